// The page: images in, predictions and maps out. Other scripts can call `patchloom.classify(blob)`.
const patchloom = (() => {
  const { program, modules, preprocessing, classes, calibration, thresholds, scale, neutral, grid, signed, drawing } = JSON.parse(by("described").textContent)
  const SHOWN = 5

  // The model, in a worker if the browser allows one ---------------------------------------------------------

  const waiting = new Map()
  let send, ready, last = 0
  const loaded = new Promise((resolve, reject) => {
    ready = message => message.kind === "ready" ? resolve(message.kernels) : reject(new Error(message.why))
  })

  function receive(message) {
    if (!waiting.has(message.id)) return ready(message)
    const { resolve, reject } = waiting.get(message.id)
    waiting.delete(message.id)
    message.kind === "answer" ? resolve(message) : reject(new Error(message.why))
  }

  function start() {
    const weights = by("weights").textContent
    by("weights").remove()
    const load = { kind: "load", program, weights, modules, preprocessing, temperature: calibration.temperature, several: thresholds !== null, scale }
    try {
      const source = by("model").textContent + "\nconst answer = serve(m => postMessage(m)); onmessage = e => answer(e.data)"
      const worker = new Worker(URL.createObjectURL(new Blob([source], { type: "text/javascript" })))
      worker.onmessage = event => receive(event.data)
      worker.onerror = event => ready({ why: event.message })
      send = (message, moved) => worker.postMessage(message, moved)
      send(load)
    } catch {
      const answer = serve(receive)
      send = message => setTimeout(() => answer(message))
      send(load)
    }
  }

  async function classifyPixels(rgba, width, height) {
    await loaded
    const id = ++last
    return new Promise((resolve, reject) => {
      waiting.set(id, { resolve, reject })
      send({ kind: "picture", id, rgba, width, height }, [rgba.buffer])
    })
  }

  // Images ----------------------------------------------------------------------------------------------------

  async function classify(blob) {
    const { data, width, height } = await pixelsOf(blob)
    return classifyPixels(data, width, height)
  }

  // Maps --------------------------------------------------------------------------------------------------------

  // Evidence for a class at each patch. Signed maps are relative to the mean of all classes, since only differences of
  // their logits matter, or to what is neutral for a label or number.
  function mapOf(answer, chosen) {
    const many = classes.length
    return Float32Array.from({ length: grid[0] * grid[1] }, (_, place) => {
      const row = answer.map.subarray(place * many, (place + 1) * many)
      return signed ? row[chosen] - (neutral ? neutral[chosen] : row.reduce((a, b) => a + b, 0) / many) : row[chosen]
    })
  }

  // Strengths from −1 to 1. Signed maps use the scale of the most likely class, so that classes can be compared.
  function strengths(answer, chosen) {
    const map = mapOf(answer, chosen)
    if (signed) {
      const largest = Math.max(...mapOf(answer, ordered(answer)[0]).map(Math.abs)) || 1
      return map.map(x => Math.max(-1, Math.min(1, x / largest)))
    }
    const low = Math.min(...map), high = Math.max(...map)
    return map.map(x => (x - low) / (high - low || 1))
  }

  // Draws the network's input, enlarged, with or without the map of a class.
  function draw(canvas, answer, chosen) {
    const [height, width] = preprocessing.size
    drawSeen(canvas, { rgb: answer.seen, width, height }, chosen === null ? null : strengths(answer, chosen), grid)
  }

  // Results -----------------------------------------------------------------------------------------------

  let current = null, chosen = 0

  const ordered = answer => answer.order ??= scale ? [...classes.keys()] : [...classes.keys()].sort((a, b) => answer.probabilities[b] - answer.probabilities[a])

  // Why the model does not answer, or "". Distances from training images are not part of the page.
  function abstained(answer) {
    if (thresholds !== null || scale) return ""
    const best = ordered(answer)[0], share = answer.probabilities[best]
    if (calibration.negatives.includes(best)) return `most like the negatives (${classes[best]} ${percent(share)})`
    return share < calibration.threshold ? `unsure: best guess ${classes[best]} ${percent(share)}, below ${percent(calibration.threshold)}` : ""
  }

  // The predicted class, all labels whose score reaches its threshold, or all numbers.
  const predicted = answer => scale ? [...classes.keys()] : thresholds === null ? ordered(answer).slice(0, 1)
    : ordered(answer).filter(number => answer.probabilities[number] >= thresholds[number])

  // The probability of a class or label, or a number itself.
  const figure = (answer, number) => scale ? String(Number(answer.probabilities[number].toPrecision(4))) : percent(answer.probabilities[number])

  function headline(answer) {
    const numbers = predicted(answer)
    if (!numbers.length) return ["no label"]
    return numbers.flatMap((number, i) =>
      [i ? ", " : "", classes[number], " ", made("small", { textContent: figure(answer, number) })])
  }

  function row(answer, number) {
    const share = scale ? undefined : answer.probabilities[number]
    const below = thresholds !== null && share < thresholds[number] ? `, below ${percent(thresholds[number])}` : ""
    return choice({ value: number, name: classes[number], text: figure(answer, number) + below, share, checked: number === chosen, choose: () => choose(number) })
  }

  function showMap() {
    if (!by("map")) return
    draw(by("map"), current.answer, chosen)
    by("for").textContent = `what speaks for ${classes[chosen]}`
    by("map").setAttribute("aria-label", by("for").textContent)
  }

  function choose(number) {
    chosen = number
    for (const input of document.querySelectorAll("#rows input")) input.checked = Number(input.value) === number
    by("all").value = String(number)
    showMap()
  }

  function show(picture) {
    current = picture
    const { answer, name } = picture, order = ordered(answer)
    chosen = predicted(answer)[0] ?? order[0]
    const reason = abstained(answer)
    by("best").replaceChildren(...reason ? ["None of these", " ", made("small", { textContent: reason })] : headline(answer))
    by("rows").replaceChildren(...order.slice(0, Math.max(SHOWN, predicted(answer).length)).map(number => row(answer, number)))
    draw(by("seen"), answer, null)
    by("name").textContent = `${name} as the network sees it`
    by("seen").setAttribute("aria-label", by("name").textContent)
    by("time").textContent = `Answered in ${answer.seconds < 0.1 ? (1000 * answer.seconds).toFixed(0) + " ms" : answer.seconds.toFixed(2) + " s"}.`
    by("all").value = String(chosen)
    by("answer").hidden = false
    by("status").hidden = true
    showMap()
    markCurrent(picture)
  }

  function keep(picture) {
    const names = abstained(picture.answer) ? "none of these" : predicted(picture.answer).map(number => scale ? `${classes[number]} ${figure(picture.answer, number)}` : classes[number]).join(", ")
    addThumbnail(picture, canvas => draw(canvas, picture.answer, null), names || "no label", show)
  }

  // Files are processed one after another, so that only one is decoded at a time.
  async function take(files) {
    complain("")
    const faults = []
    for (const [number, file] of [...files].entries()) {
      report(`Looking at ${number + 1} of ${files.length} …`, true)
      try {
        const picture = { name: file.name || "pasted image", answer: await classify(file) }
        keep(picture)
        show(picture)
      } catch (error) {
        faults.push(error.name === "InvalidStateError" || error.name === "EncodingError"
          ? `${file.name || "What was pasted"} is not an image that this browser can read.` : `${file.name}: ${error.message}`)
      }
    }
    report(current === null ? "No image yet." : "")
    complain(faults.join(" "))
  }

  // Drawing -----------------------------------------------------------------------------------------------------

  function paper(canvas) {
    const context = canvas.getContext("2d", { willReadFrequently: true })
    const ground = drawing.ink === "white" ? "#000" : "#fff"
    let busy = false, again = false, before = null

    function clear() {
      context.fillStyle = ground
      context.fillRect(0, 0, canvas.width, canvas.height)
    }

    // Returns left, top, right, bottom of the drawing, or null.
    function drawnBox() {
      const { data } = context.getImageData(0, 0, canvas.width, canvas.height)
      let box = null
      for (let y = 0, at = 0; y < canvas.height; y++)
        for (let x = 0; x < canvas.width; x++, at += 4)
          if ((data[at] > 127) === (drawing.ink === "white"))
            box = box ? [Math.min(box[0], x), box[1], Math.max(box[2], x + 1), y + 1] : [x, y, x + 1, y + 1]
      return box
    }

    // The frame that the network sees: the whole canvas, or the drawing with the margin of the training images.
    function frame(box) {
      if (!by("fit").checked) return [0, 0, canvas.width]
      const side = Math.max(box[2] - box[0], box[3] - box[1]) / drawing.fills
      return [(box[0] + box[2] - side) / 2, (box[1] + box[3] - side) / 2, side]
    }

    async function look() {
      const box = drawnBox()
      if (!box) return
      if (busy) return void (again = true)
      busy = true
      const [left, top, side] = frame(box), size = Math.round(side)
      const [, cut] = canvasOf(size, size)
      cut.fillStyle = ground
      cut.fillRect(0, 0, size, size)
      cut.drawImage(canvas, -Math.round(left), -Math.round(top))
      const answer = await classifyPixels(cut.getImageData(0, 0, size, size).data, size, size)
      show({ name: "drawing", answer })
      busy = false
      if (again) {
        again = false
        look()
      }
    }

    function stroke(event) {
      const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width
      const place = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale]
      context.strokeStyle = drawing.ink
      context.lineWidth = canvas.width / 10
      context.lineCap = context.lineJoin = "round"
      context.beginPath()
      context.moveTo(...(before ?? place))
      context.lineTo(...place)
      context.stroke()
      before = place
    }

    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId)
      stroke(event)
    })
    canvas.addEventListener("pointermove", event => before && (stroke(event), look()))
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { before = null; look() })
    by("clear").addEventListener("click", clear)
    by("fit").addEventListener("change", look)
    clear()
  }

  // Start ---------------------------------------------------------------------------------------------------

  onImages(take)
  by("all").append(...classes.map((name, number) => made("option", { value: number, textContent: name })))
  by("all").addEventListener("change", () => choose(Number(by("all").value)))
  by("other").hidden = classes.length <= SHOWN || !program.map
  if (drawing) paper(by("paper"))
  loaded.then(kernels => {
    if (current === null) report("Ready: no image yet.")
    document.body.dataset.kernels = kernels
  }, error => complain(`The model could not be prepared: ${error.message}`))
  start()
  return { classify, classes, loaded }
})()
