// Runs a program (program.py) on one image: one function per operation, all on float32 in one block of memory:
//   weights | values | unpacked rows of a weight | a panel of a product
// Products use addresses in bytes; everything else uses indices of floats.

const ROWS_AT_ONCE = 8 // of a weight: the widest panel
const DEPTH_AT_ONCE = 256 // of a product: a panel of 8 KB stays in the first cache

// The kernels of kernels.py in JavaScript, for browsers without WebAssembly vectors.
function plainKernels(buffer) {
  const floats = new Float32Array(buffer), bytes = new Int8Array(buffer), halves = new Uint16Array(buffer)
  const word = new Float32Array(1), bits = new Uint32Array(word.buffer)
  function half(value) {
    bits[0] = (value & 0x7fff) << 13 | (value & 0x8000) << 16
    return word[0] * 2 ** 112
  }
  function panel(width, a, aRow, from, c, cRow, m, k) {
    a >>= 2; aRow >>= 2; from >>= 2; c >>= 2; cRow >>= 2
    for (let i = 0; i < m; i++, a += aRow, c += cRow)
      for (let j = 0; j < width; j++) {
        let sum = floats[c + j]
        for (let l = 0; l < k; l++) sum += floats[a + l] * floats[from + l * width + j]
        floats[c + j] = sum
      }
  }
  return {
    unpack8(from, to, count, scale) {
      to >>= 2
      for (let i = 0; i < count; i++) floats[to + i] = bytes[from + i] * scale
    },
    unpack16(from, to, count, scale) {
      from >>= 1; to >>= 2
      for (let i = 0; i < count; i++) floats[to + i] = half(halves[from + i]) * scale
    },
    pack(from, step, across, to, k, n) {
      from >>= 2; step >>= 2; across >>= 2; to >>= 2
      for (let l = 0; l < k; l++, from += step)
        for (let j = 0; j < n; j++) floats[to++] = floats[from + j * across]
    },
    panel8: (...where) => panel(8, ...where),
    panel4: (...where) => panel(4, ...where),
    panel1: (...where) => panel(1, ...where),
  }
}

// Instantiates the first module that this browser supports, with `bytes` of memory; falls back to plain JavaScript.
function makeKernels(modules, bytes) {
  for (const [name, code] of modules) {
    if (typeof WebAssembly !== "object" || !WebAssembly.validate(code)) continue
    try {
      const memory = new WebAssembly.Memory({ initial: Math.ceil(bytes / 65536) })
      const instance = new WebAssembly.Instance(new WebAssembly.Module(code), { env: { memory } })
      return { name, kernels: instance.exports, buffer: memory.buffer }
    } catch (error) {
      if (!(error instanceof WebAssembly.CompileError || error instanceof WebAssembly.LinkError)) throw error
    }
  }
  const buffer = new ArrayBuffer(Math.ceil(bytes / 16) * 16)
  return { name: "JavaScript", kernels: plainKernels(buffer), buffer }
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x))
  const rest = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
  const size = 1 - rest * Math.exp(-x * x)
  return x < 0 ? -size : size
}

const ACTIVATIONS = {
  gelu: x => 0.5 * x * (1 + erf(x * Math.SQRT1_2)),
  gelu_tanh: x => 0.5 * x * (1 + Math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
  silu: x => x / (1 + Math.exp(-x)),
  hardswish: x => x * Math.min(Math.max(x + 3, 0), 6) / 6,
  relu: x => Math.max(x, 0),
  relu6: x => Math.min(Math.max(x, 0), 6),
  hardsigmoid: x => Math.min(Math.max(x + 3, 0), 6) / 6,
  sigmoid: x => 1 / (1 + Math.exp(-x)),
}

// Prepares a program with its weights (bytes) to run.
function makeModel(program, weights, modules) {
  const up = n => Math.ceil(n / 16) * 16
  const longest = Math.max(8, ...program.tensors.map(one => one.form === "float" ? 0 : up(one.columns)))
  const valuesAt = up(weights.byteLength)
  const tallest = Math.max(0, ...program.operations.filter(one => one.op === "mix").map(one => {
    const weight = program.tensors[one.weight]
    return weight.rows * up(weight.columns)
  }))
  const rowsAt = valuesAt + up(4 * program.floats)
  const panelAt = rowsAt + 4 * Math.max((ROWS_AT_ONCE + 1) * longest, tallest)
  const { name, kernels, buffer } = makeKernels(modules, panelAt + 4 * ROWS_AT_ONCE * DEPTH_AT_ONCE + 64)
  const floats = new Float32Array(buffer)
  new Uint8Array(buffer).set(weights)

  const values = program.values.map(([at, rows, columns]) => {
    const byte = valuesAt + 4 * at
    return { byte, at: byte >> 2, rows, columns, size: rows * columns }
  })
  const vector = number => floats.subarray(program.tensors[number].at >> 2)

  // Unpacks rows of a tensor to float32 at `to`, one every `stride` bytes. Rows are padded to a multiple of 8.
  function unpackRows(tensor, first, count, to, stride) {
    const filled = Math.ceil(tensor.columns / 8) * 8
    const [unpack, size] = tensor.form === "int8" ? [kernels.unpack8, 1] : [kernels.unpack16, 2]
    for (let row = first; row < first + count; row++, to += stride)
      unpack(tensor.at + size * row * filled, to, filled, floats[(tensor.scales >> 2) + row])
  }

  function narrower(left) {
    return left >= 8 ? 8 : left >= 4 ? 4 : 1
  }

  // c (m, n) += a (m, k) · b (k, n). The strides of b along k and n are parameters, so b may be transposed.
  function product(m, n, k, a, aRow, b, bStep, bAcross, c, cRow) {
    for (let j = 0, width; j < n; j += width) {
      width = narrower(n - j)
      for (let l = 0; l < k; l += DEPTH_AT_ONCE) {
        const depth = Math.min(DEPTH_AT_ONCE, k - l)
        kernels.pack(b + l * bStep + j * bAcross, bStep, bAcross, panelAt, depth, width)
        kernels["panel" + width](a + 4 * l, aRow, panelAt, c + 4 * j, cRow, m, depth)
      }
    }
  }

  function fill(value, start) {
    floats.fill(start, value.at, value.at + value.size)
  }

  // Returns mean and 1 / standard deviation of a row.
  function moments(at, columns, eps) {
    let sum = 0, squares = 0
    for (let j = 0; j < columns; j++) sum += floats[at + j]
    const mean = sum / columns
    for (let j = 0; j < columns; j++) squares += (floats[at + j] - mean) ** 2
    return [mean, 1 / Math.sqrt(squares / columns + eps)]
  }

  function length(at, columns) {
    let squares = 0
    for (let j = 0; j < columns; j++) squares += floats[at + j] ** 2
    return Math.sqrt(squares)
  }

  // Calls `each` for every window in order, with the index of its position (y, z), or −1 if that is outside the map.
  function overWindows({ height, width, kernel, stride, padding }, x, y, z, each) {
    for (let top = y - padding, last = height + padding - kernel + y; top <= last; top += stride)
      for (let left = z - padding, end = width + padding - kernel + z; left <= end; left += stride)
        each(top >= 0 && top < height && left >= 0 && left < width ? x.at + (top * width + left) * x.columns : -1)
  }

  const OPERATIONS = {
    linear(step, out, x) {
      const weight = program.tensors[step.weight], stride = 4 * up(weight.columns)
      if (!step.onto) {
        fill(out, 0)
        if (step.bias !== null) {
          const bias = vector(step.bias).subarray(0, out.columns)
          for (let i = 0; i < out.rows; i++) floats.set(bias, out.at + i * out.columns)
        }
      }
      for (let j = 0; j < weight.rows; j += ROWS_AT_ONCE) {
        const rows = Math.min(ROWS_AT_ONCE, weight.rows - j)
        unpackRows(weight, j, rows, rowsAt, stride)
        product(x.rows, rows, x.columns, x.byte, 4 * x.columns, rowsAt, 4, stride, out.byte + 4 * j, 4 * out.columns)
      }
    },
    mix(step, out, x) {
      const weight = program.tensors[step.weight], stride = 4 * up(weight.columns)
      const n = out.columns
      for (let i = 0; i < out.rows; i++) {
        const row = i % weight.rows, at = out.at + i * n
        if (step.table === undefined) floats.fill(vector(step.bias)[row], at, at + n)
        else {
          unpackRows(program.tensors[step.table], row, 1, rowsAt, 0)
          floats.copyWithin(at, rowsAt >> 2, (rowsAt >> 2) + n)
        }
      }
      unpackRows(weight, 0, weight.rows, rowsAt, stride)
      for (let part = 0; part < step.parts; part++) {
        const from = x.byte + 4 * part * weight.columns * n, to = out.byte + 4 * part * weight.rows * n
        product(weight.rows, n, weight.columns, rowsAt, stride, from, 4 * n, 4, to, 4 * n)
      }
    },
    activate(step, out, x) {
      const f = ACTIVATIONS[step.kind]
      for (let i = 0; i < x.size; i++) floats[out.at + i] = f(floats[x.at + i])
    },
    affine(step, out, x) {
      const weight = vector(step.weight), bias = vector(step.bias)
      for (let i = 0; i < x.size; i++)
        floats[out.at + i] = floats[x.at + i] * weight[i % x.columns] + bias[i % x.columns]
    },
    add(step, out, x, y) {
      const scale = step.scale === null ? null : vector(step.scale)
      const wide = step.scale === null ? 1 : program.tensors[step.scale].columns
      for (let i = 0; i < x.size; i++)
        floats[out.at + i] = floats[x.at + i] + floats[y.at + i] * (scale ? scale[i % wide] : 1)
    },
    multiply(step, out, x, gate) {
      for (let i = 0; i < x.size; i++) floats[out.at + i] = floats[x.at + i] * floats[gate.at + i % x.columns]
    },
    constant(step, out) {
      const table = program.tensors[step.table]
      for (let i = 0; i < out.rows; i++) {
        unpackRows(table, i, 1, rowsAt, 0)
        floats.copyWithin(out.at + i * out.columns, rowsAt >> 2, (rowsAt >> 2) + out.columns)
      }
    },
    join(step, out, x, y) {
      floats.copyWithin(out.at, x.at, x.at + x.size)
      floats.copyWithin(out.at + x.size, y.at, y.at + y.size)
    },
    rows(step, out, x) {
      const start = x.at + step.start * x.columns
      floats.copyWithin(out.at, start, start + out.size)
    },
    mean(step, out, x) {
      fill(out, 0)
      for (let i = 0; i < x.size; i++) floats[out.at + i % x.columns] += floats[x.at + i]
      for (let j = 0; j < x.columns; j++) floats[out.at + j] /= x.rows
    },
    transpose(step, out, x) {
      for (let i = 0; i < x.rows; i++)
        for (let j = 0; j < x.columns; j++) floats[out.at + j * x.rows + i] = floats[x.at + i * x.columns + j]
    },
    layernorm(step, out, x) {
      const learned = step.weight !== undefined
      const weight = learned ? vector(step.weight) : null, bias = learned ? vector(step.bias) : null
      for (let i = 0; i < x.rows; i++) {
        const at = x.at + i * x.columns, to = out.at + i * x.columns
        const [mean, scale] = moments(at, x.columns, step.eps)
        for (let j = 0; j < x.columns; j++) {
          const value = (floats[at + j] - mean) * scale
          floats[to + j] = learned ? value * weight[j] + bias[j] : value
        }
      }
    },
    length(step, out, x) {
      for (let i = 0; i < x.rows; i++) {
        const at = x.at + i * x.columns, to = out.at + i * x.columns
        const scale = Math.sqrt(x.columns) / Math.max(length(at, x.columns), step.eps)
        for (let j = 0; j < x.columns; j++) floats[to + j] = floats[at + j] * scale
      }
    },
    // A norm with the statistics of a token instead of x: linear in x, so contributions add up.
    held(step, out, x, token) {
      const layer = step.kind === "layer"
      const scale = layer ? moments(token.at, token.columns, step.eps)[1] : Math.sqrt(x.columns) / length(token.at, x.columns)
      for (let i = 0; i < x.rows; i++) {
        const at = x.at + i * x.columns, to = out.at + i * x.columns
        const mean = layer ? moments(at, x.columns, 0)[0] : 0
        for (let j = 0; j < x.columns; j++) floats[to + j] = (floats[at + j] - mean) * scale
      }
    },
    patches(step, out, x) {
      const { height, width, side } = step, row = side * x.columns
      let to = out.at
      for (let top = 0; top + side <= height; top += side)
        for (let left = 0; left + side <= width; left += side)
          for (let y = top; y < top + side; y++, to += row) {
            const from = x.at + (y * width + left) * x.columns
            floats.copyWithin(to, from, from + row)
          }
    },
    neighbors(step, out, x) {
      const { height, width, stride } = step, wide = x.columns
      fill(out, 0)
      let to = out.at
      for (let top = 0; top < height; top += stride)
        for (let left = 0; left < width; left += stride)
          for (let y = top - 1; y <= top + 1; y++)
            for (let z = left - 1; z <= left + 1; z++, to += wide)
              if (y >= 0 && y < height && z >= 0 && z < width) {
                const from = x.at + (y * width + z) * wide
                floats.copyWithin(to, from, from + wide)
              }
    },
    windows(step, out, x) {
      const { kernel } = step, wide = x.columns
      fill(out, 0)
      for (let y = 0; y < kernel; y++)
        for (let z = 0; z < kernel; z++) {
          let to = out.at + (y * kernel + z) * wide
          overWindows(step, x, y, z, from => {
            if (from >= 0) floats.copyWithin(to, from, from + wide)
            to += out.columns
          })
        }
    },
    filtered(step, out, x) {
      const { kernel } = step, wide = x.columns, tap = rowsAt >> 2
      fill(out, 0)
      if (step.bias !== null) {
        const bias = vector(step.bias).subarray(0, wide)
        for (let i = 0; i < out.rows; i++) floats.set(bias, out.at + i * wide)
      }
      for (let place = 0; place < kernel * kernel; place++) {
        let to = out.at
        unpackRows(program.tensors[step.taps], place, 1, rowsAt, 0)
        overWindows(step, x, Math.floor(place / kernel), place % kernel, from => {
          if (from >= 0) for (let j = 0; j < wide; j++) floats[to + j] += floats[from + j] * floats[tap + j]
          to += wide
        })
      }
    },
    largest(step, out, x) {
      const { kernel } = step, wide = x.columns
      fill(out, -Infinity)
      for (let place = 0; place < kernel * kernel; place++) {
        let to = out.at
        overWindows(step, x, Math.floor(place / kernel), place % kernel, from => {
          if (from >= 0) for (let j = 0; j < wide; j++) floats[to + j] = Math.max(floats[to + j], floats[from + j])
          to += wide
        })
      }
    },
    depthwise(step, out, x) {
      const { height, width } = step, wide = x.columns, tap = rowsAt >> 2
      const bias = step.bias === null ? null : vector(step.bias).subarray(0, wide)
      const stride = up(wide)
      unpackRows(program.tensors[step.taps], 0, 9, rowsAt, 4 * stride)
      if (!bias) fill(out, 0)
      for (let y = 0; y < height; y++)
        for (let z = 0; z < width; z++) {
          const to = out.at + (y * width + z) * wide
          if (bias) floats.set(bias, to)
          for (let dy = -1; dy <= 1; dy++)
            for (let dz = -1; dz <= 1; dz++) {
              if (y + dy < 0 || y + dy >= height || z + dz < 0 || z + dz >= width) continue
              const from = x.at + ((y + dy) * width + z + dz) * wide, by = tap + (3 * dy + dz + 4) * stride
              for (let j = 0; j < wide; j++) floats[to + j] += floats[from + j] * floats[by + j]
            }
        }
    },
    scores(step, out, q, k) {
      const d = step.width / step.heads, scale = 1 / Math.sqrt(d)
      fill(out, 0)
      for (let head = 0; head < step.heads; head++)
        product(q.rows, k.rows, d, q.byte + 4 * (step.q_at + head * d), 4 * q.columns,
          k.byte + 4 * (step.k_at + head * d), 4, 4 * k.columns, out.byte + 4 * head * out.columns, 4 * k.rows)
      for (let i = 0; i < out.size; i++) floats[out.at + i] *= scale
    },
    softmax(step, out, x) {
      for (let start = 0; start < x.size; start += step.keys) {
        let top = -Infinity, sum = 0
        for (let i = start; i < start + step.keys; i++) top = Math.max(top, floats[x.at + i])
        for (let i = start; i < start + step.keys; i++) sum += floats[out.at + i] = Math.exp(floats[x.at + i] - top)
        for (let i = start; i < start + step.keys; i++) floats[out.at + i] /= sum
      }
    },
    attend(step, out, weights, v) {
      const d = out.columns / step.heads
      fill(out, 0)
      for (let head = 0; head < step.heads; head++)
        product(out.rows, d, v.rows, weights.byte + 4 * head * weights.columns, 4 * v.rows,
          v.byte + 4 * (step.v_at + head * d), 4 * v.columns, 4, out.byte + 4 * head * d, 4 * out.columns)
    },
    // The contribution of each patch to one token, before the sum: its value, weighted per head.
    spread(step, out, weights, v) {
      const keys = weights.columns / step.tokens, d = out.columns / step.heads
      for (let i = 0; i < out.rows; i++)
        for (let j = 0; j < out.columns; j++) {
          const key = step.first + i, head = Math.floor(j / d)
          const weight = floats[weights.at + head * weights.columns + step.token * keys + key]
          floats[out.at + i * out.columns + j] = weight * floats[v.at + key * v.columns + step.v_at + j]
        }
    },
    rowdot(step, out, x) {
      const bias = vector(step.bias), row = rowsAt >> 2
      for (let i = 0; i < x.rows; i++) {
        unpackRows(program.tensors[step.weight], i, 1, rowsAt, 0)
        let sum = bias[i]
        for (let j = 0; j < x.columns; j++) sum += floats[x.at + i * x.columns + j] * floats[row + j]
        floats[out.at + i] = sum
      }
    },
    fuse(step, out, x, y) {
      const [one, other] = [x, y].map(value => floats.slice(value.at, value.at + value.size))
      const [a, b] = step.shares ? [shares(one), shares(other)] : [one, other]
      for (let i = 0; i < out.size; i++) {
        const half = (a[i] + b[i]) / 2
        floats[out.at + i] = step.shares ? Math.log(half) : half
      }
    },
  }

  // Returns the logits, and the map (h·w, classes) or null, for normalized pixels (H·W, 3).
  function run(pixels) {
    const image = values[program.image]
    floats.set(pixels, image.at)
    for (const step of program.operations)
      OPERATIONS[step.op](step, values[step.out], ...step.in.map(number => values[number]))
    const read = number => floats.slice(values[number].at, values[number].at + values[number].size)
    return { logits: read(program.logits), map: program.map === null ? null : read(program.map) }
  }

  return { run, kernels: name }
}

// One probability per label, of which any number applies.
function sigmoids(logits) {
  return Float32Array.from(logits, x => 1 / (1 + Math.exp(-x)))
}

// Softmax.
function shares(logits) {
  const top = logits.reduce((a, b) => Math.max(a, b), -Infinity)
  const grown = Array.from(logits, x => Math.exp(x - top))
  const sum = grown.reduce((a, b) => a + b, 0)
  return Float32Array.from(grown, x => x / sum)
}
