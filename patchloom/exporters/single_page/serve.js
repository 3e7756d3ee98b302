// Runs the model on messages from the page and posts predictions. It runs in a worker, or in the page itself if the
// browser does not allow workers.

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64)
  const text = atob(base64), bytes = new Uint8Array(text.length)
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i)
  return bytes
}

function serve(post) {
  let model, preprocessing, temperature, probabilities
  return message => {
    if (message.kind === "load") {
      try {
        const modules = message.modules.map(([name, code]) => [name, bytesOf(code)])
        model = makeModel(message.program, bytesOf(message.weights), modules)
        preprocessing = message.preprocessing
        temperature = message.temperature
        const { mean, std } = message.scale ?? {}
        probabilities = mean ? outputs => outputs.map((x, i) => x * std[i] + mean[i]) : message.several ? sigmoids : shares
        post({ kind: "ready", kernels: model.kernels })
      } catch (error) {
        post({ kind: "failed", why: String(error) })
      }
      return
    }
    const { id, rgba, width, height } = message
    try {
      const start = performance.now()
      const seen = networkPixels(rgba, width, height, preprocessing)
      const { logits, map } = model.run(normalized(seen, preprocessing))
      const seconds = (performance.now() - start) / 1000
      post({ kind: "answer", id, seen, probabilities: probabilities(logits.map(value => value / temperature)), map, seconds })
    } catch (error) {
      post({ kind: "error", id, why: String(error) })
    }
  }
}
