// A picture as the network is shown it: resized, cropped and normalised as patchloom's test transform does it.
// The resize is Pillow's, number for number: filters stretched by the scale, weights of 22 bits, along rows, then along
// columns. Pillow 13 takes columns first in some tall pictures, which alters some pixels by a little.

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

// For each place of the new side: where it begins to read, and its weights.
function readings(from, to, [support, filter]) {
  const scale = from / to, stretch = Math.max(scale, 1), reach = support * stretch
  return Array.from({ length: to }, (_, place) => {
    const centre = (place + 0.5) * scale
    const first = Math.max(0, Math.trunc(centre - reach + 0.5))
    const last = Math.min(from, Math.trunc(centre + reach + 0.5))
    const weights = Array.from({ length: last - first }, (_, i) => filter((i + first - centre + 0.5) * (1 / stretch)))
    const sum = weights.reduce((a, b) => a + b, 0)
    const whole = weights.map(weight => {
      const scaled = (sum === 0 ? weight : weight / sum) * 2 ** WEIGHT_BITS
      return Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5))
    })
    return { first, weights: whole }
  })
}

// Lines of `length` colours (3 bytes each, `step` apart, `across` from one line to the next) brought to another length.
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

// RGB (3 bytes a pixel) → RGB of another size.
function resize(pixels, width, height, newWidth, newHeight, interpolation) {
  const filter = FILTERS[interpolation]
  if (newWidth !== width) {
    const wide = new Uint8ClampedArray(newWidth * height * 3), places = readings(width, newWidth, filter)
    pixels = resampled(pixels, height, 3 * width, 3, places, wide, 3 * newWidth, 3)
  }
  if (newHeight !== height) {
    const high = new Uint8ClampedArray(newWidth * newHeight * 3), places = readings(height, newHeight, filter)
    pixels = resampled(pixels, newWidth, 3, 3 * newWidth, places, high, 3, 3 * newWidth)
  }
  return pixels
}

// As Python's round: a half goes to the even neighbour.
function roundHalfEven(x) {
  const low = Math.floor(x)
  return x - low === 0.5 ? low + low % 2 : Math.round(x)
}

// RGBA of a canvas → RGB (H, W) that the network sees.
function seenBy(rgba, width, height, { size: [seenHeight, seenWidth], crop, interpolation, resize: to }) {
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

// Bytes → (x / 255 − mean) / std.
function normalised(seen, { mean, std }) {
  const scale = std.map(s => Math.fround(1 / (255 * s))), shift = mean.map((m, i) => Math.fround(-m / std[i]))
  return Float32Array.from(seen, (value, i) => Math.fround(value * scale[i % 3]) + shift[i % 3])
}
