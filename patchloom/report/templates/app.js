// The page of `patchloom app`: what a person gives goes to the server that the page came from, what it answers is shown.

// Run lengths as COCO packs them: 5 bits a letter, from the third on as differences to the last but one.
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
  const { verbs, labels, levels, level, colours, about, limits } = JSON.parse(by("described").textContent)
  const does = verb => verbs.includes(verb)
  const SHOWN = 5, HITS = 12, VOTERS = 20, THUMBNAIL = 320, LARGEST = 1200 // pixels of a drawing
  const LEAST_SCORE = 0.05 // of objects that are asked for; the slider hides more
  const TRIES = 4 // of a request while the server is busy

  // What a screen would act upon is shown as its number.
  const said = text => text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    letter => "\\u" + letter.charCodeAt(0).toString(16).padStart(4, "0"))

  // The server ----------------------------------------------------------------------------------------------------

  const wait = seconds => new Promise(resolve => setTimeout(resolve, 1000 * seconds))

  // One answer; an Error with the server's own line where there is none.
  async function asked(verb, body, kind, options = {}) {
    for (let tries = 1; ; tries++) {
      let response
      try {
        const given = Object.entries(options).filter(([, value]) => value !== undefined)
        response = await fetch(`/${verb}?${new URLSearchParams(given)}`, { method: "POST", body, headers: { "Content-Type": kind } })
      } catch {
        throw new Error("The server does not answer. Is `patchloom app` still running?")
      }
      const told = await response.json().catch(() => ({ error: `the server answered ${response.status}` }))
      if (response.ok) return { results: told.results, seconds: secondsOf(response) }
      if (response.status !== 503 || tries === TRIES) throw new Error(told.error)
      const pause = Number(response.headers.get("Retry-After")) || 1
      report(`The server is busy; asking again in ${pause} s …`, true)
      await wait(pause)
    }
  }

  function secondsOf(response) {
    const model = /model;dur=([\d.]+)/.exec(response.headers.get("Server-Timing") ?? "")
    return model ? Number(model[1]) / 1000 : 0
  }

  async function askedOf(picture, verb, options) {
    const { results, seconds } = await asked(verb, picture.sent, picture.sent.type.startsWith("image/") ? picture.sent.type : "application/octet-stream", options)
    picture.seconds += seconds
    return results[0]
  }

  // Pictures ------------------------------------------------------------------------------------------------------

  const bytesOf = base64 => Uint8Array.from(atob(base64), letter => letter.charCodeAt(0))
  const kindOf = base64 => base64.startsWith("iVBOR") ? "image/png" : "image/jpeg"
  const blobOf = base64 => new Blob([bytesOf(base64)], { type: kindOf(base64) })

  async function rgbOf(base64) {
    const { data, width, height } = await pixelsOf(blobOf(base64))
    const rgb = new Uint8ClampedArray(3 * width * height)
    for (let i = 0, j = 0; j < rgb.length; i += 4, j += 3) rgb.set(data.subarray(i, i + 3), j)
    return { rgb, width, height }
  }

  // The file as it is, or smaller where the server would refuse it; `bitmap` is null where the browser cannot read it.
  async function opened(file) {
    const bitmap = await createImageBitmap(file).catch(() => null)
    const picture = { name: said(file.name || "pasted picture"), sent: file, bitmap, seconds: 0, note: "" }
    if (!bitmap || file.size <= limits.bytes && bitmap.width * bitmap.height <= limits.pixels) return picture
    const factor = Math.min(1, Math.sqrt(Math.min(limits.pixels, 12e6) / (bitmap.width * bitmap.height)))
    const [canvas, context] = canvasOf(Math.floor(bitmap.width * factor), Math.floor(bitmap.height * factor))
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height)
    picture.sent = await new Promise(resolve => canvas.toBlob(resolve, "image/jpeg", 0.92))
    picture.note = `It was reduced to ${canvas.width} × ${canvas.height} pixels to be sent.`
    return picture
  }

  // The picture itself on a canvas, at most so large; grey where the browser cannot read it.
  function drawPicture(canvas, picture, side, size = null) {
    const { width, height } = picture.bitmap ?? size ?? { width: side, height: side }
    const factor = Math.min(1, side / Math.max(width, height))
    const enlarged = Math.max(factor, Math.floor(Math.min(side, 480) / Math.max(width, height)))
    canvas.width = Math.max(1, Math.round(width * enlarged))
    canvas.height = Math.max(1, Math.round(height * enlarged))
    const context = canvas.getContext("2d", { willReadFrequently: true })
    context.imageSmoothingEnabled = enlarged < 1
    context.fillStyle = picture.bitmap ? "#fff" : "#888"
    context.fillRect(0, 0, canvas.width, canvas.height)
    if (picture.bitmap) context.drawImage(picture.bitmap, 0, 0, canvas.width, canvas.height)
    return context
  }

  function named(canvas, text) {
    canvas.setAttribute("aria-label", text)
    return text
  }

  function caption(picture, words) {
    by("name").textContent = named(by("photo") ?? by("seen"), `${picture.name}${words}`) + (picture.note && ` · ${picture.note}`)
    if (!picture.bitmap) by("name").textContent += " · This browser cannot show a file of this kind."
    const { seconds } = picture
    by("time").textContent = `Answered in ${seconds < 0.1 ? (1000 * seconds).toFixed(0) + " ms" : seconds.toFixed(2) + " s"}.`
  }

  let current = null

  // Classes, maps and neighbours ----------------------------------------------------------------------------------

  const classes = {
    async ask(picture) {
      picture.maps = new Map()
      if (does("explain")) await classes.map(picture)
      else if (does("predict")) picture.answers = (await askedOf(picture, "predict", { top: SHOWN })).answers
      else picture.answers = []
      if (does("search")) await neighbours.ask(picture)
    },

    // What speaks for a class, asked once per picture.
    async map(picture, label) {
      if (label !== undefined && picture.maps.has(label)) return picture.maps.get(label)
      const told = await askedOf(picture, "explain", { top: SHOWN, label })
      picture.answers ??= told.answers
      picture.seen ??= await rgbOf(told.seen)
      picture.kind = told.kind
      picture.chosen ??= told.label
      picture.maps.set(told.label, { values: told.map.flat(), grid: [told.map.length, told.map[0].length] })
      return picture.maps.get(told.label)
    },

    best: picture => picture.answers.length ? said(picture.answers[0].label) : picture.votes?.length ? said(picture.votes[0].label) : "",

    small(canvas, picture) {
      picture.seen ? drawSeen(canvas, picture.seen, null) : drawPicture(canvas, picture, 160)
    },

    show(picture) {
      const [first] = picture.answers
      by("best").replaceChildren(...first ? [said(first.label), " ", made("small", { textContent: percent(first.probability) })] : [])
      by("best").hidden = by("answers").hidden = !first
      by("rows").replaceChildren(...picture.answers.map(({ label, probability }) => choice({
        value: label, name: said(label), told: percent(probability), share: probability, checked: label === picture.chosen, choose: does("explain") && (() => classes.choose(label)),
      })))
      // The photo as sharp as the browser has it; what the network sees of it is small beside it.
      by("view").hidden = !picture.seen || !picture.bitmap
      if (picture.seen) drawSeen(by(picture.bitmap ? "seen" : "photo"), picture.seen, null)
      if (picture.bitmap || !picture.seen) drawPicture(by("photo"), picture, LARGEST)
      caption(picture, picture.seen && !picture.bitmap ? " as the network sees it" : "")
      if (does("explain")) classes.showMap(picture)
      if (does("search")) neighbours.show(picture)
    },

    showMap(picture) {
      const { values, grid } = picture.maps.get(picture.chosen)
      drawSeen(by("map"), picture.seen, values, grid)
      by("for").textContent = named(by("map"), picture.chosen ? `what speaks for ${said(picture.chosen)}` : "what its vector is made of")
      by("about").textContent = about[picture.kind]
      by("all").value = picture.chosen
    },

    async choose(label) {
      const picture = current
      picture.chosen = label
      for (const input of document.querySelectorAll("#rows input")) input.checked = input.value === label
      by("all").value = label
      complain("")
      try {
        await classes.map(picture, label)
        if (current === picture && picture.chosen === label) classes.showMap(picture)
      } catch (error) {
        complain(said(error.message))
      }
      if (current === picture) report("")
    },
  }

  const neighbours = {
    async ask(picture) {
      const told = await askedOf(picture, "search", { top: HITS, neighbours: VOTERS, thumbnails: THUMBNAIL, level: by("level").value || undefined })
      Object.assign(picture, { hits: told.hits, votes: told.answers, level: told.level })
    },

    show(picture) {
      const [first] = picture.votes
      by("voted").textContent = first ? `They vote for ${said(first.label)}, ${percent(first.probability)}` : ""
      by("hits").replaceChildren(...picture.hits.map(hit => neighbours.card(hit)))
      by("nearest").hidden = false
    },

    card({ path, score, label, match, thumbnail }) {
      const file = said(path.split("/").pop())
      const small = thumbnail ? made("img", { src: `data:${kindOf(thumbnail)};base64,${thumbnail}`, alt: file }) : made("span", { className: "gone", textContent: "not shown" })
      small.addEventListener("load", () => small.classList.toggle("tiny", small.naturalWidth <= 64))
      const words = [made("b", { textContent: said(label) || "no label" })]
      if (levels.length > 1 && label) words.push(made("span", match ? { className: "same", textContent: `same ${match === levels[0] ? "class" : said(match)}` } : { textContent: "another class" }))
      words.push(made("span", { className: "figure", textContent: `cosine ${score.toFixed(3)}` }), made("span", { className: "file", textContent: file, title: said(path) }))
      return made("li", {}, made("figure", {}, small, made("figcaption", {}, ...words)))
    },

    async relabel() {
      const picture = current
      if (!picture) return
      by("nearest").setAttribute("aria-busy", "true")
      complain("")
      try {
        await neighbours.ask(picture)
        if (current === picture) neighbours.show(picture)
      } catch (error) {
        complain(said(error.message))
      }
      by("nearest").removeAttribute("aria-busy")
    },
  }

  // Masks and objects ---------------------------------------------------------------------------------------------

  const colour = number => `rgb(${(colours[number] ?? [128, 128, 128]).join(" ")})`

  // All, then each: the chosen one is drawn alone.
  function choices(picture, all, rows) {
    const choose = value => () => { picture.alone = value; shown.draw(picture) }
    const row = (value, given) => choice({ ...given, value, checked: picture.alone === value, choose: choose(value) })
    by("rows").replaceChildren(row(-1, { name: all, told: "" }), ...rows.map(([value, given]) => row(value, given)))
  }

  const masks = {
    async ask(picture) {
      const told = await askedOf(picture, "segment")
      Object.assign(picture, { answer: told, mask: await pixelsOf(blobOf(told.mask)), alone: -1 })
    },

    best: picture => said(picture.answer.classes[0]?.label ?? ""),

    drawn: labels.length <= 256, // more are no colours of a palette

    show(picture) {
      const [first] = picture.answer.classes
      by("best").replaceChildren(said(first.label), " ", made("small", { textContent: `${percent(first.share)} of the pixels` }))
      choices(picture, "All classes", picture.answer.classes.map(({ number, label, share }) =>
        [number, { name: said(label), told: percent(share), share, swatch: colour(number) }]))
      caption(picture, masks.drawn ? "" : " · masks of more than 256 classes are not drawn")
      masks.draw(picture)
    },

    // The mask's own colours are those of its classes, so that one class is found by its colour.
    draw(picture) {
      const { mask, alone } = picture, strength = by("range").value / 100
      by("ranged").textContent = `${by("range").value} %`
      if (!masks.drawn) return void drawPicture(by("seen"), picture, LARGEST, mask)
      const [layer, context] = canvasOf(mask.width, mask.height), inks = new ImageData(new Uint8ClampedArray(mask.data), mask.width, mask.height)
      if (alone >= 0)
        for (let i = 0; i < inks.data.length; i += 4)
          if (colours[alone].some((value, channel) => inks.data[i + channel] !== value)) inks.data[i + 3] = 0
      context.putImageData(inks, 0, 0)
      const canvas = by("seen"), under = drawPicture(canvas, picture, LARGEST, mask)
      under.imageSmoothingEnabled = false
      under.globalAlpha = strength
      under.drawImage(layer, 0, 0, canvas.width, canvas.height)
      under.globalAlpha = 1
    },
  }

  const objects = {
    async ask(picture) {
      picture.answer = await askedOf(picture, "detect", { min_score: LEAST_SCORE })
      picture.alone = -1
    },

    sure: picture => [...picture.answer.objects.entries()].filter(([, one]) => one.score >= by("range").value / 100),

    best: picture => `${objects.sure(picture).length} found`,

    show(picture) {
      by("ranged").textContent = `${by("range").value} %`
      const sure = objects.sure(picture), least = `${picture.answer.objects.length} below that score`
      if (!sure.some(([number]) => number === picture.alone)) picture.alone = -1
      const counts = new Map()
      for (const [, one] of sure) counts.set(one.label, (counts.get(one.label) ?? 0) + 1)
      const words = [...counts].map(([label, count]) => `${count} × ${said(label)}`).join(", ")
      by("best").replaceChildren(...sure.length ? [words] : ["Nothing found ", made("small", { textContent: picture.answer.objects.length ? least : "" })])
      choices(picture, sure.length ? "All objects" : "No object", sure.map(([number, one]) =>
        [number, { name: said(one.label), told: percent(one.score), share: one.score, swatch: colour(labels.indexOf(one.label)) }]))
      caption(picture, "")
      objects.draw(picture)
    },

    draw(picture) {
      const { answer, alone } = picture, canvas = by("seen"), context = drawPicture(canvas, picture, LARGEST, answer)
      const factor = canvas.width / answer.width, line = Math.max(2, canvas.width / 280)
      context.font = `600 ${Math.max(13, Math.round(canvas.width / 50))}px system-ui, sans-serif`
      context.textBaseline = "top"
      for (const [number, one] of objects.sure(picture).reverse())
        if (alone < 0 || alone === number) objects.drawOne(context, one, factor, line, answer)
    },

    drawOne(context, { label, score, box, mask }, factor, line, answer) {
      const ink = colour(labels.indexOf(label)), [x0, y0, x1, y1] = box.map(value => value * factor)
      if (mask) {
        context.globalAlpha = 0.4
        context.drawImage(maskCanvas(mask, ink), 0, 0, answer.width * factor, answer.height * factor)
        context.globalAlpha = 1
      }
      context.strokeStyle = context.fillStyle = ink
      context.lineWidth = line
      context.strokeRect(x0, y0, x1 - x0, y1 - y0)
      const words = `${said(label)} ${percent(score)}`, size = parseFloat(/(\d+)px/.exec(context.font)[1])
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

  // The whole -----------------------------------------------------------------------------------------------------

  const shown = does("segment") ? masks : does("detect") ? objects : classes

  function show(picture) {
    current = picture
    by("answer").hidden = false
    by("empty").hidden = true
    shown.show(picture)
    markKept(picture)
  }

  let waiting = Promise.resolve()

  // One after the other, in the order they came.
  function take(files) {
    waiting = waiting.then(() => takeAll(files))
    return waiting
  }

  async function takeAll(files) {
    complain("")
    const faults = []
    by("place").setAttribute("aria-busy", "true")
    for (const [number, file] of files.entries()) {
      report(files.length > 1 ? `Looking at ${number + 1} of ${files.length} …` : "Looking at the picture …", true)
      try {
        const picture = await opened(file)
        await shown.ask(picture)
        show(picture)
        keepBelow(picture, canvas => shown.small ? shown.small(canvas, picture) : drawPicture(canvas, picture, 160), shown.best(picture), show)
        markKept(picture)
      } catch (error) {
        faults.push(`${said(file.name || "pasted picture")}: ${said(error.message)}`)
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
      const { results, seconds } = await asked("translate", JSON.stringify({ lines }), "application/json")
      by("translation").replaceChildren(...results.map(({ translations: [first], untrained }) => made("p", {}, said(first?.text ?? ""),
        ...untrained ? [made("span", { className: "muted", textContent: " (longer than any sentence of training: do not rely on it)" })] : [])))
      report(`Translated in ${seconds < 0.1 ? (1000 * seconds).toFixed(0) + " ms" : seconds.toFixed(2) + " s"}.`)
    } catch (error) {
      report("")
      complain(said(error.message))
    }
    by("send").disabled = false
  }

  if (does("translate")) {
    by("translating").addEventListener("submit", translate)
    by("text").addEventListener("keydown", event => event.key === "Enter" && (event.ctrlKey || event.metaKey) && by("translating").requestSubmit())
    return
  }
  whenGiven(take)
  by("range")?.addEventListener("input", () => current && (does("detect") ? shown.show(current) : shown.draw(current)))
  if (does("explain") && does("predict")) {
    by("all").append(...labels.map(name => made("option", { value: name, textContent: said(name) })))
    by("all").addEventListener("change", () => classes.choose(by("all").value))
    by("other").hidden = labels.length <= SHOWN
  }
  if (does("search")) {
    by("level").value = level
    by("leveled").hidden = levels.length < 2
    by("level").addEventListener("change", neighbours.relabel)
  }
})()
