// Shared by the pages that take images and show predictions: elements, image inputs, rows of classes, maps.

const by = id => document.getElementById(id)
const percent = share => (100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1) + " %"
const SIDE = 360, STRONGEST = 0.75 // least pixels of a drawing; opacity of the largest strength
const SMALLEST_SMOOTH = 2 // pixels of a patch; maps of larger patches are interpolated
const FOR = [178, 24, 43], AGAINST = [33, 102, 172]

function made(tag, attributes = {}, ...inside) {
  const element = Object.assign(document.createElement(tag), attributes)
  element.append(...inside)
  return element
}

function canvasOf(width, height) {
  const canvas = made("canvas", { width, height })
  return [canvas, canvas.getContext("2d", { willReadFrequently: true })]
}

// Return the pixels of a file as patchloom reads them: upright, without color management, over white.
async function pixelsOf(blob) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" })
  const [, context] = canvasOf(bitmap.width, bitmap.height)
  context.fillStyle = "#fff"
  context.fillRect(0, 0, bitmap.width, bitmap.height)
  context.drawImage(bitmap, 0, 0)
  return context.getImageData(0, 0, bitmap.width, bitmap.height)
}

// Maps ----------------------------------------------------------------------------------------------------------

function between(map, [rows, columns], y, x) {
  const clip = (value, most) => Math.max(0, Math.min(most, value))
  const top = clip(Math.floor(y), rows - 1), left = clip(Math.floor(x), columns - 1)
  const low = clip(top + 1, rows - 1), right = clip(left + 1, columns - 1)
  const down = clip(y - top, 1), across = clip(x - left, 1)
  const mixed = (a, b, share) => a + (b - a) * share
  return mixed(mixed(map[top * columns + left], map[top * columns + right], across),
    mixed(map[low * columns + left], map[low * columns + right], across), down)
}

// Draw pixels (RGB, `height` rows of `width`), enlarged, with a map of strengths −1…1 over them, or without (null).
function drawSeen(canvas, { rgb, width, height }, map, grid) {
  const scale = Math.max(1, Math.ceil(SIDE / Math.max(height, width)))
  canvas.width = width * scale
  canvas.height = height * scale
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height)
  const blocks = map && height / grid[0] <= SMALLEST_SMOOTH
  for (let y = 0, at = 0; y < canvas.height; y++)
    for (let x = 0; x < canvas.width; x++, at += 4) {
      const from = 3 * (Math.floor(y / scale) * width + Math.floor(x / scale))
      let color = rgb.subarray(from, from + 3)
      if (map) {
        const down = (y + 0.5) / canvas.height * grid[0], across = (x + 0.5) / canvas.width * grid[1]
        const strength = blocks ? map[Math.floor(down) * grid[1] + Math.floor(across)] : between(map, grid, down - 0.5, across - 0.5)
        const pale = 128 + (0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]) / 2
        const opacity = STRONGEST * Math.abs(strength), ink = strength < 0 ? AGAINST : FOR
        color = ink.map(value => pale * (1 - opacity) + value * opacity)
      }
      image.data.set([color[0], color[1], color[2], 255], at)
    }
  context.putImageData(image, 0, 0)
}

// Results -------------------------------------------------------------------------------------------------------

// Return a row with name, number and, if known, a bar of its share; `choose` makes it selectable.
function choice({ value, name, text, share, checked, choose, swatch }) {
  const label = made(choose ? "label" : "div", { className: "row" }, made("span", { className: "name", textContent: name }),
    made("span", { className: "share", textContent: text }))
  if (choose) {
    const input = made("input", { type: "radio", name: "class", value, checked })
    input.addEventListener("change", choose)
    label.prepend(input)
  }
  if (swatch) {
    const color = made("i", { className: "swatch" })
    color.style.background = swatch
    label.querySelector(".name").prepend(color)
  }
  if (share === undefined) return label
  const bar = made("i")
  bar.style.width = `${100 * share}%`
  label.append(made("span", { className: "rail" }, bar))
  return label
}

function complain(text) {
  by("fault").textContent = text
  by("fault").hidden = !text
}

function report(text, busy = false) {
  by("status").replaceChildren(...text ? [made("p", { className: busy ? "muted busy" : "muted", textContent: text })] : [])
  by("status").hidden = !text
}

// Earlier images as thumbnails below; `draw` draws one.
const thumbnails = []
function addThumbnail(image, draw, words, show) {
  const [canvas] = canvasOf(1, 1)
  draw(canvas)
  image.button = made("button", { type: "button", title: image.name }, canvas, made("span", { textContent: words }),
    made("span", { className: "muted", textContent: image.name }))
  image.button.addEventListener("click", () => show(image))
  thumbnails.push(image)
  by("strip").append(made("li", {}, image.button))
  by("many").hidden = thumbnails.length < 2
}

function markCurrent(image) {
  for (const other of thumbnails) other.button.setAttribute("aria-current", other === image)
}

// Call `take` with images that are chosen, photographed, dropped or pasted.
function onImages(take) {
  for (const input of [by("files"), by("camera")])
    input.addEventListener("change", () => take([...input.files]).then(() => { input.value = "" }))
  addEventListener("dragover", event => { event.preventDefault(); document.body.classList.add("dropping") })
  addEventListener("dragleave", event => event.relatedTarget || document.body.classList.remove("dropping"))
  addEventListener("drop", event => {
    event.preventDefault()
    document.body.classList.remove("dropping")
    take([...event.dataTransfer.files])
  })
  addEventListener("paste", event => event.clipboardData.files.length && take([...event.clipboardData.files]))
}
