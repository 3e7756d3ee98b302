// The page of `patchloom app`: it sends images and text to its server and shows the predictions.

// Decode run lengths as COCO packs them: 5 bits per letter; from the third on, differences to the last but one.
function runsOf(text) {
  const runs = []
  for (let at = 0; at < text.length;) {
    let value = 0, bits = 0, more = true
    while (more) {
      const letter = text.charCodeAt(at++) - 48
      value |= (letter & 31) << 5 * bits++
      more = (letter & 32) !== 0
      if (!more && letter & 16) value |= -1 << 5 * bits
    }
    runs.push(runs.length > 2 ? value + runs[runs.length - 2] : value)
  }
  return runs
}

(() => {
  const { verbs, labels, several, levels, level, colours, about, limits } = JSON.parse(by("described").textContent)
  const does = verb => verbs.includes(verb)
  const NO_LABEL = "no label"
  const SHOWN = 5, HITS = 12, VOTERS = 20, THUMBNAIL = 320, LARGEST = 1200 // pixels of a drawing
  const LEAST_SCORE = 0.05 // of requested objects; the slider hides more
  const TRIES = 4 // attempts of a request while the server is busy

  // Escape control characters.
  const printable = text => text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    letter => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"))

  // The server ----------------------------------------------------------------------------------------------------

  const wait = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds))

  // Return one response; throw an Error with the server's message if there is none.
  async function request(verb, body, kind, options = {}) {
    for (let tries = 1; ; tries++) {
      let response
      try {
        const present = Object.entries(options).filter(([, value]) => value !== undefined)
        response = await fetch(`/${verb}?${new URLSearchParams(present)}`, { method: "POST", body, headers: { "Content-Type": kind } })
      } catch {
        throw new Error("The server does not answer. Is `patchloom app` still running?")
      }
      const reply = await response.json().catch(() => ({ error: `the server answered ${response.status}` }))
      if (response.ok) return { results: reply.results, seconds: secondsOf(response) }
      if (response.status !== 503 || tries === TRIES) throw new Error(reply.error)
      const pause = Number(response.headers.get("Retry-After")) || 1
      report(`The server is busy; retrying in ${pause} s …`, true)
      await wait(pause)
    }
  }

  function secondsOf(response) {
    const model = /model;dur=([\d.]+)/.exec(response.headers.get("Server-Timing") ?? "")
    return model ? Number(model[1]) / 1000 : 0
  }

  async function requestImage(image, verb, options) {
    const { results, seconds } = await request(verb, image.sent, image.sent.type.startsWith("image/") ? image.sent.type : "application/octet-stream", options)
    image.seconds += seconds
    return results[0]
  }

  // Images --------------------------------------------------------------------------------------------------------

  const bytesOf = base64 => Uint8Array.from(atob(base64), letter => letter.charCodeAt(0))
  const kindOf = base64 => base64.startsWith("iVBOR") ? "image/png" : "image/jpeg"
  const blobOf = base64 => new Blob([bytesOf(base64)], { type: kindOf(base64) })

  async function rgbOf(base64) {
    const { data, width, height } = await pixelsOf(blobOf(base64))
    const rgb = new Uint8ClampedArray(3 * width * height)
    for (let i = 0, j = 0; j < rgb.length; i += 4, j += 3) rgb.set(data.subarray(i, i + 3), j)
    return { rgb, width, height }
  }

  // Return the file, reduced if the server would refuse it; `bitmap` is null if the browser cannot read it.
  async function opened(file) {
    const bitmap = await createImageBitmap(file).catch(() => null)
    const image = { name: printable(file.name || "pasted image"), sent: file, bitmap, seconds: 0, note: "" }
    if (!bitmap || file.size <= limits.bytes && bitmap.width * bitmap.height <= limits.pixels) return image
    const factor = Math.min(1, Math.sqrt(Math.min(limits.pixels, 12e6) / (bitmap.width * bitmap.height)))
    const [canvas, context] = canvasOf(Math.floor(bitmap.width * factor), Math.floor(bitmap.height * factor))
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height)
    image.sent = await new Promise(resolve => canvas.toBlob(resolve, "image/jpeg", 0.92))
    image.note = `It was reduced to ${canvas.width} × ${canvas.height} pixels to be sent.`
    return image
  }

  // Draw the image on a canvas of at most `side` pixels; gray if the browser cannot read it.
  function drawPicture(canvas, image, side, size = null) {
    const { width, height } = image.bitmap ?? size ?? { width: side, height: side }
    const factor = Math.min(1, side / Math.max(width, height))
    const enlarged = Math.max(factor, Math.floor(Math.min(side, 480) / Math.max(width, height)))
    canvas.width = Math.max(1, Math.round(width * enlarged))
    canvas.height = Math.max(1, Math.round(height * enlarged))
    const context = canvas.getContext("2d", { willReadFrequently: true })
    context.imageSmoothingEnabled = enlarged < 1
    context.fillStyle = image.bitmap ? "#fff" : "#888"
    context.fillRect(0, 0, canvas.width, canvas.height)
    if (image.bitmap) context.drawImage(image.bitmap, 0, 0, canvas.width, canvas.height)
    return context
  }

  function named(canvas, text) {
    canvas.setAttribute("aria-label", text)
    return text
  }

  function caption(image, words) {
    by("name").textContent = named(by("photo") ?? by("seen"), `${image.name}${words}`) + (image.note && ` · ${image.note}`)
    if (!image.bitmap) by("name").textContent += " · This browser cannot show a file of this kind."
    const { seconds } = image
    by("time").textContent = `Predicted in ${seconds < 0.1 ? (1000 * seconds).toFixed(0) + " ms" : seconds.toFixed(2) + " s"}.`
  }

  let current = null

  // Classes, maps and neighbors -----------------------------------------------------------------------------------

  const classes = {
    async ask(image) {
      image.maps = new Map()
      if (does("explain")) await classes.map(image)
      else if (does("regress")) image.answers = (await requestImage(image, "regress", {})).numbers.map(({ name, number }) => ({ label: name, number }))
      else if (does("predict")) Object.assign(image, await requestImage(image, "predict", several ? {} : { top: SHOWN }))
      else image.answers = []
      if (does("search")) await neighbors.ask(image)
    },

    // The evidence for a class, requested once per image.
    async map(image, label) {
      if (label !== undefined && image.maps.has(label)) return image.maps.get(label)
      const reply = await requestImage(image, "explain", several ? { label } : { top: SHOWN, label })
      image.answers ??= reply.answers
      image.abstained ??= reply.abstained
      image.seen ??= await rgbOf(reply.seen)
      image.kind = reply.kind
      image.chosen ??= reply.label
      image.maps.set(reply.label, { values: reply.map.flat(), grid: [reply.map.length, reply.map[0].length] })
      return image.maps.get(reply.label)
    },

    // The probability of a class, or a number itself.
    figure: ({ probability, number }) => number === undefined ? percent(probability) : String(Number(number.toPrecision(4))),

    best: image => image.abstained ? "none of these" : several ? image.answers.map(each => printable(each.label)).join(", ") || NO_LABEL : does("regress") ? image.answers.map(each => `${printable(each.label)} ${classes.figure(each)}`).join(", ") : image.answers.length ? printable(image.answers[0].label) : image.votes?.length ? printable(image.votes[0].label) : "",

    small(canvas, image) {
      image.seen ? drawSeen(canvas, image.seen, null) : drawPicture(canvas, image, 160)
    },

    show(image) {
      const best = several || does("regress") ? image.answers : image.answers.slice(0, 1)
      const texts = best.flatMap((answer, i) =>
        [i ? ", " : "", printable(answer.label), " ", made("small", { textContent: classes.figure(answer) })])
      const abstained = image.abstained && ["None of these", " ", made("small", { textContent: printable(image.abstained) })]
      by("best").replaceChildren(...abstained || (several && !best.length ? [NO_LABEL] : texts))
      by("best").hidden = !several && !best.length
      by("answers").hidden = !best.length
      by("rows").replaceChildren(...image.answers.map(answer => choice({
        value: answer.label, name: printable(answer.label), text: classes.figure(answer), share: answer.probability, checked: answer.label === image.chosen, choose: does("explain") && (() => classes.choose(answer.label)),
      })))
      // The original image, with the small input of the network next to it.
      by("view").hidden = !image.seen || !image.bitmap
      if (image.seen) drawSeen(by(image.bitmap ? "seen" : "photo"), image.seen, null)
      if (image.bitmap || !image.seen) drawPicture(by("photo"), image, LARGEST)
      caption(image, image.seen && !image.bitmap ? " as the network sees it" : "")
      if (does("explain")) classes.showMap(image)
      if (does("search")) neighbors.show(image)
    },

    showMap(image) {
      const { values, grid } = image.maps.get(image.chosen)
      drawSeen(by("map"), image.seen, values, grid)
      by("for").textContent = named(by("map"), image.chosen ? `evidence for ${printable(image.chosen)}` : "contribution to its vector")
      by("about").textContent = about[image.kind]
      by("all").value = image.chosen
    },

    async choose(label) {
      const image = current
      image.chosen = label
      for (const input of document.querySelectorAll("#rows input")) input.checked = input.value === label
      by("all").value = label
      complain("")
      try {
        await classes.map(image, label)
        if (current === image && image.chosen === label) classes.showMap(image)
      } catch (error) {
        complain(printable(error.message))
      }
      if (current === image) report("")
    },
  }

  const neighbors = {
    async ask(image) {
      const reply = await requestImage(image, "search", { top: HITS, neighbours: VOTERS, thumbnails: THUMBNAIL, level: by("level").value || undefined })
      Object.assign(image, { hits: reply.hits, votes: reply.answers, level: reply.level })
    },

    show(image) {
      const [first] = image.votes
      by("voted").textContent = first ? `They vote for ${printable(first.label)}, ${percent(first.probability)}` : ""
      by("hits").replaceChildren(...image.hits.map(hit => neighbors.card(hit)))
      by("nearest").hidden = false
    },

    card({ path, score, label, match, thumbnail }) {
      const file = printable(path.split("/").pop())
      const small = thumbnail ? made("img", { src: `data:${kindOf(thumbnail)};base64,${thumbnail}`, alt: file }) : made("span", { className: "gone", textContent: "not shown" })
      small.addEventListener("load", () => small.classList.toggle("tiny", small.naturalWidth <= 64))
      const words = [made("b", { textContent: printable(label) || "no label" })]
      if (levels.length > 1 && label) words.push(made("span", match ? { className: "same", textContent: `same ${match === levels[0] ? "class" : printable(match)}` } : { textContent: "another class" }))
      words.push(made("span", { className: "figure", textContent: `cosine ${score.toFixed(3)}` }), made("span", { className: "file", textContent: file, title: printable(path) }))
      return made("li", {}, made("figure", {}, small, made("figcaption", {}, ...words)))
    },

    async relabel() {
      const image = current
      if (!image) return
      by("nearest").setAttribute("aria-busy", "true")
      complain("")
      try {
        await neighbors.ask(image)
        if (current === image) neighbors.show(image)
      } catch (error) {
        complain(printable(error.message))
      }
      by("nearest").removeAttribute("aria-busy")
    },
  }

  // Masks and objects ---------------------------------------------------------------------------------------------

  const color = number => `rgb(${(colours[number] ?? [128, 128, 128]).join(" ")})`

  // Rows for all and for each; a chosen one is drawn alone.
  function choices(image, all, rows) {
    const choose = value => () => { image.alone = value; task.draw(image) }
    const row = (value, options) => choice({ ...options, value, checked: image.alone === value, choose: choose(value) })
    by("rows").replaceChildren(row(-1, { name: all, text: "" }), ...rows.map(([value, options]) => row(value, options)))
  }

  const masks = {
    async ask(image) {
      const reply = await requestImage(image, "segment")
      Object.assign(image, { answer: reply, mask: await pixelsOf(blobOf(reply.mask)), alone: -1 })
    },

    best: image => printable(image.answer.classes[0]?.label ?? ""),

    drawn: labels.length <= 256, // more do not fit into a palette

    show(image) {
      const [first] = image.answer.classes
      by("best").replaceChildren(printable(first.label), " ", made("small", { textContent: `${percent(first.share)} of the pixels` }))
      choices(image, "All classes", image.answer.classes.map(({ number, label, share }) =>
        [number, { name: printable(label), text: percent(share), share, swatch: color(number) }]))
      caption(image, masks.drawn ? "" : " · masks of more than 256 classes are not drawn")
      masks.draw(image)
    },

    // The colors of the mask are those of its classes, so a class is identified by its color.
    draw(image) {
      const { mask, alone } = image, strength = by("range").value / 100
      by("ranged").textContent = `${by("range").value} %`
      if (!masks.drawn) return void drawPicture(by("seen"), image, LARGEST, mask)
      const [layer, context] = canvasOf(mask.width, mask.height), inks = new ImageData(new Uint8ClampedArray(mask.data), mask.width, mask.height)
      if (alone >= 0)
        for (let i = 0; i < inks.data.length; i += 4)
          if (colours[alone].some((value, channel) => inks.data[i + channel] !== value)) inks.data[i + 3] = 0
      context.putImageData(inks, 0, 0)
      const canvas = by("seen"), under = drawPicture(canvas, image, LARGEST, mask)
      under.imageSmoothingEnabled = false
      under.globalAlpha = strength
      under.drawImage(layer, 0, 0, canvas.width, canvas.height)
      under.globalAlpha = 1
    },
  }

  const objects = {
    async ask(image) {
      image.answer = await requestImage(image, "detect", { min_score: LEAST_SCORE })
      image.alone = -1
    },

    sure: image => [...image.answer.objects.entries()].filter(([, one]) => one.score >= by("range").value / 100),

    best: image => `${objects.sure(image).length} found`,

    show(image) {
      by("ranged").textContent = `${by("range").value} %`
      const sure = objects.sure(image), least = `${image.answer.objects.length} below that score`
      if (!sure.some(([number]) => number === image.alone)) image.alone = -1
      const counts = new Map()
      for (const [, one] of sure) counts.set(one.label, (counts.get(one.label) ?? 0) + 1)
      const words = [...counts].map(([label, count]) => `${count} × ${printable(label)}`).join(", ")
      by("best").replaceChildren(...sure.length ? [words] : ["Nothing found ", made("small", { textContent: image.answer.objects.length ? least : "" })])
      choices(image, sure.length ? "All objects" : "No object", sure.map(([number, one]) =>
        [number, { name: printable(one.label), text: percent(one.score), share: one.score, swatch: color(labels.indexOf(one.label)) }]))
      caption(image, "")
      objects.draw(image)
    },

    draw(image) {
      const { answer, alone } = image, canvas = by("seen"), context = drawPicture(canvas, image, LARGEST, answer)
      const factor = canvas.width / answer.width, line = Math.max(2, canvas.width / 280)
      context.font = `600 ${Math.max(13, Math.round(canvas.width / 50))}px system-ui, sans-serif`
      context.textBaseline = "top"
      for (const [number, one] of objects.sure(image).reverse())
        if (alone < 0 || alone === number) objects.drawOne(context, one, factor, line, answer)
    },

    drawOne(context, { label, score, box, mask }, factor, line, answer) {
      const ink = color(labels.indexOf(label)), [x0, y0, x1, y1] = box.map(value => value * factor)
      if (mask) {
        context.globalAlpha = 0.4
        context.drawImage(maskCanvas(mask, ink), 0, 0, answer.width * factor, answer.height * factor)
        context.globalAlpha = 1
      }
      context.strokeStyle = context.fillStyle = ink
      context.lineWidth = line
      context.strokeRect(x0, y0, x1 - x0, y1 - y0)
      const words = `${printable(label)} ${percent(score)}`, size = parseFloat(/(\d+)px/.exec(context.font)[1])
      const wide = context.measureText(words).width + 8, x = Math.max(0, Math.min(x0 - line / 2, context.canvas.width - wide))
      const y = y0 > size + 6 ? y0 - size - 6 : y0
      context.fillRect(x, y, wide, size + 6)
      context.fillStyle = "#fff"
      context.fillText(words, x + 4, y + 3)
    },
  }

  function maskCanvas({ size: [height, width], counts }, ink) {
    const [canvas, context] = canvasOf(width, height)
    context.fillStyle = ink
    context.fillRect(0, 0, 1, 1)
    const color = context.getImageData(0, 0, 1, 1).data, image = context.createImageData(width, height)
    let at = 0, inside = false
    for (const run of runsOf(counts)) {
      if (inside) for (let i = at; i < at + run; i++) image.data.set(color, 4 * (i % height * width + Math.floor(i / height)))
      at += run
      inside = !inside
    }
    context.putImageData(image, 0, 0)
    return canvas
  }

  // Page ----------------------------------------------------------------------------------------------------------

  const task = does("segment") ? masks : does("detect") ? objects : classes

  function show(image) {
    current = image
    by("answer").hidden = false
    by("empty").hidden = true
    task.show(image)
    markCurrent(image)
  }

  let waiting = Promise.resolve()

  // Process images one after the other, in their order.
  function take(files) {
    waiting = waiting.then(() => takeAll(files))
    return waiting
  }

  async function takeAll(files) {
    complain("")
    const faults = []
    by("place").setAttribute("aria-busy", "true")
    for (const [number, file] of files.entries()) {
      report(files.length > 1 ? `Looking at ${number + 1} of ${files.length} …` : "Looking at the image …", true)
      try {
        const image = await opened(file)
        await task.ask(image)
        show(image)
        addThumbnail(image, canvas => task.small ? task.small(canvas, image) : drawPicture(canvas, image, 160), task.best(image), show)
        markCurrent(image)
      } catch (error) {
        faults.push(`${printable(file.name || "pasted image")}: ${printable(error.message)}`)
      }
    }
    report("")
    by("place").removeAttribute("aria-busy")
    complain(faults.join(" "))
    if (files.length && matchMedia("(max-width: 760px)").matches) by(faults.length ? "fault" : "place").scrollIntoView({ block: faults.length ? "center" : "start" })
  }

  async function translate(event) {
    event.preventDefault()
    const lines = by("text").value.replace(/\n+$/, "").split("\n")
    if (!lines.some(line => line.trim())) return by("text").focus()
    complain("")
    report("Translating …", true)
    by("send").disabled = true
    try {
      const { results, seconds } = await request("translate", JSON.stringify({ lines }), "application/json")
      by("translation").replaceChildren(...results.map(({ translations: [first], untrained }) => made("p", {}, printable(first?.text ?? ""),
        ...untrained ? [made("span", { className: "muted", textContent: " (longer than any sentence in training, so unreliable)" })] : [])))
      report(`Translated in ${seconds < 0.1 ? (1000 * seconds).toFixed(0) + " ms" : seconds.toFixed(2) + " s"}.`)
    } catch (error) {
      report("")
      complain(printable(error.message))
    }
    by("send").disabled = false
  }

  if (does("translate")) {
    by("translating").addEventListener("submit", translate)
    by("text").addEventListener("keydown", event => event.key === "Enter" && (event.ctrlKey || event.metaKey) && by("translating").requestSubmit())
    return
  }
  onImages(take)
  by("range")?.addEventListener("input", () => current && (does("detect") ? task.show(current) : task.draw(current)))
  if (does("explain") && does("predict")) {
    by("all").append(...labels.map(name => made("option", { value: name, textContent: printable(name) })))
    by("all").addEventListener("change", () => classes.choose(by("all").value))
    by("other").hidden = labels.length <= SHOWN && !several
  }
  if (does("search")) {
    by("level").value = level
    by("leveled").hidden = levels.length < 2
    by("level").addEventListener("change", neighbors.relabel)
  }
})()
