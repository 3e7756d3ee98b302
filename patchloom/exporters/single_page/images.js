// Preprocessing of images: resize, crop and normalize, as patchloom's evaluation transform does.
// The resize gives the same numbers as Pillow's: filters stretched by the scale, weights of 22 bits, along rows, then
// along columns. Pillow 13 processes columns first in some tall images, which changes a few pixels slightly.

const FILTERS = {
  bilinear: [1, x => (x = Math.abs(x)) < 1 ? 1 - x : 0],
  bicubic: [2, x => {
    const a = -0.5
    x = Math.abs(x)
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0
  }],
  lanczos: [3, x => {
    const sinc = y => y === 0 ? 1 : Math.sin(y * Math.PI) / (y * Math.PI)
    return -3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0
  }],
  box: [0.5, x => -0.5 < x && x <= 0.5 ? 1 : 0],
}
const WEIGHT_BITS = 22

// For each position of the new side: the first pixel it reads, and the weights.
function filterWeights(from, to, [support, filter]) {
  const scale = from / to, stretch = Math.max(scale, 1), reach = support * stretch
  return Array.from({ length: to }, (_, place) => {
    const center = (place + 0.5) * scale
    const first = Math.max(0, Math.trunc(center - reach + 0.5))
    const last = Math.min(from, Math.trunc(center + reach + 0.5))
    const weights = Array.from({ length: last - first }, (_, i) => filter((i + first - center + 0.5) * (1 / stretch)))
    const sum = weights.reduce((a, b) => a + b, 0)
    const whole = weights.map(weight => {
      const scaled = (sum === 0 ? weight : weight / sum) * 2 ** WEIGHT_BITS
      return Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5))
    })
    return { first, weights: whole }
  })
}

// Resamples lines of RGB pixels (3 bytes each, `step` apart, lines `across` apart) to another length.
function resampled(pixels, lines, across, step, places, target, targetAcross, targetStep) {
  const half = 2 ** (WEIGHT_BITS - 1)
  for (let line = 0; line < lines; line++)
    for (let place = 0; place < places.length; place++) {
      const { first, weights } = places[place]
      let at = line * across + first * step, red = half, green = half, blue = half
      for (let i = 0; i < weights.length; i++, at += step) {
        red += pixels[at] * weights[i]; green += pixels[at + 1] * weights[i]; blue += pixels[at + 2] * weights[i]
      }
      const to = line * targetAcross + place * targetStep
      target[to] = Math.floor(red / 2 ** WEIGHT_BITS)
      target[to + 1] = Math.floor(green / 2 ** WEIGHT_BITS)
      target[to + 2] = Math.floor(blue / 2 ** WEIGHT_BITS)
    }
  return target
}

// Resizes RGB pixels (3 bytes each).
function resize(pixels, width, height, newWidth, newHeight, interpolation) {
  const filter = FILTERS[interpolation]
  if (newWidth !== width) {
    const wide = new Uint8ClampedArray(newWidth * height * 3), places = filterWeights(width, newWidth, filter)
    pixels = resampled(pixels, height, 3 * width, 3, places, wide, 3 * newWidth, 3)
  }
  if (newHeight !== height) {
    const high = new Uint8ClampedArray(newWidth * newHeight * 3), places = filterWeights(height, newHeight, filter)
    pixels = resampled(pixels, newWidth, 3, 3 * newWidth, places, high, 3, 3 * newWidth)
  }
  return pixels
}

// Rounds as Python does: a half goes to the even neighbor.
function roundHalfEven(x) {
  const low = Math.floor(x)
  return x - low === 0.5 ? low + low % 2 : Math.round(x)
}

// Returns the network's input, RGB (H, W), for the RGBA pixels of a canvas.
function networkPixels(rgba, width, height, { size: [seenHeight, seenWidth], crop, interpolation, resize: to }) {
  const pixels = new Uint8ClampedArray(width * height * 3)
  for (let i = 0, j = 0; j < pixels.length; i += 4, j += 3) {
    pixels[j] = rgba[i]; pixels[j + 1] = rgba[i + 1]; pixels[j + 2] = rgba[i + 2]
  }
  const high = Math.trunc(seenHeight / crop), wide = Math.trunc(seenWidth / crop)
  const byHeight = high * width >= wide * height
  const newHeight = byHeight || to === "square" ? high : Math.trunc(wide * height / width)
  const newWidth = byHeight && to !== "square" ? Math.trunc(high * width / height) : wide
  const whole = resize(pixels, width, height, newWidth, newHeight, interpolation)
  const top = roundHalfEven((newHeight - seenHeight) / 2), left = roundHalfEven((newWidth - seenWidth) / 2)
  const seen = new Uint8ClampedArray(seenWidth * seenHeight * 3)
  for (let y = 0; y < seenHeight; y++) {
    const from = ((top + y) * newWidth + left) * 3
    seen.set(whole.subarray(from, from + 3 * seenWidth), 3 * y * seenWidth)
  }
  return seen
}

// Maps bytes to (x / 255 − mean) / std.
function normalized(seen, { mean, std }) {
  const scale = std.map(s => Math.fround(1 / (255 * s))), shift = mean.map((m, i) => Math.fround(-m / std[i]))
  return Float32Array.from(seen, (value, i) => Math.fround(value * scale[i % 3]) + shift[i % 3])
}
