// What pages share that take pictures and show answers: elements, ways in for pictures, rows of classes, maps.

const by = id => document.getElementById(id)
const percent = share => (100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1) + " %"
const SIDE = 360, STRONGEST = 0.75 // pixels of a drawing at least; opacity of the largest strength
const SMALLEST_SMOOTH = 2 // pixels of a patch: the maps of larger ones are interpolated
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

// The pixels of a file, upright, without colour management, over white, as patchloom reads them.
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

// Pixels (RGB, `height` rows of `width`), large, with strengths from −1 to 1 over them, or without (null).
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

// What is shown -------------------------------------------------------------------------------------------------

// A row: name, number, and how much of the whole it is where that is known; one that can be chosen says what then.
function choice({ value, name, told, share, checked, choose, swatch }) {
  const label = made(choose ? "label" : "div", { className: "row" }, made("span", { className: "name", textContent: name }),
    made("span", { className: "share", textContent: told }))
  if (choose) {
    const input = made("input", { type: "radio", name: "class", value, checked })
    input.addEventListener("change", choose)
    label.prepend(input)
  }
  if (swatch) {
    const colour = made("i", { className: "swatch" })
    colour.style.background = swatch
    label.querySelector(".name").prepend(colour)
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

// Pictures below, to come back to; `draw` makes a small one.
const kept = []
function keepBelow(picture, draw, words, show) {
  const [canvas] = canvasOf(1, 1)
  draw(canvas)
  picture.button = made("button", { type: "button", title: picture.name }, canvas, made("span", { textContent: words }),
    made("span", { className: "muted", textContent: picture.name }))
  picture.button.addEventListener("click", () => show(picture))
  kept.push(picture)
  by("strip").append(made("li", {}, picture.button))
  by("many").hidden = kept.length < 2
}

function markKept(picture) {
  for (const other of kept) other.button.setAttribute("aria-current", other === picture)
}

// Pictures that are chosen, photographed, dropped or pasted.
function whenGiven(take) {
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
