// Softmax of a row of scores, without the final division. Included by heads.inl; attention.inl states the order of sums.
//
// The exponentials are 2^-16 of what the formulas say. So a sum of p * v over up to 65,536 keys is no larger than the largest v,
// and does not overflow where the result, after the division by the sum of p, would be finite. The factor is part of a constant
// that both exponentials have anyway. It changes no bit, unless p is below 2^-110 in bf16 or 2^-133 in fp32, or a sum is
// subnormal.

constexpr int kVectors = kPanel / Simd::kLanes;  // vectors in a row of a panel
constexpr float kInfinity = __builtin_inff();

// Copies a few numbers: for so few, a call of the library's memcpy takes longer than the copy itself.
inline void copy(const float* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + Simd::kLanes <= count; i += Simd::kLanes) Simd::store(to + i, Simd::load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// Reduces 32 numbers to one: joins the first half with the second, and so on. The last halves are those of a small vector,
// which the compiler reduces in registers.
template <typename Join>
float fold(Simd::reg (&vectors)[kVectors], Join join) {
#pragma GCC unroll 8
  for (int half = kVectors / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) vectors[i] = join(vectors[i], vectors[i + half]);
  }
  alignas(64) float lanes[Simd::kLanes];
  Simd::store(lanes, vectors[0]);
#pragma GCC unroll 8
  for (int half = Simd::kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) lanes[i] = join(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

struct Highest {
  Simd::reg operator()(Simd::reg a, Simd::reg b) const { return Simd::max(a, b); }
  float operator()(float a, float b) const { return a > b ? a : b; }
};

struct Sum {
  Simd::reg operator()(Simd::reg a, Simd::reg b) const { return Simd::add(a, b); }
  float operator()(float a, float b) const { return a + b; }
};

// Computes 32 of a row's x = fma(score, scale, mask), and updates the highest ones so far.
inline void add_mask(const float* scores, Simd::reg scale, const float* mask, float* x,
                     Simd::reg (&highest)[kVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int at = v * Simd::kLanes;
    const Simd::reg sum = Simd::fma(Simd::load(scores + at), scale, Simd::load(mask + at));
    Simd::store(x + at, sum);
    highest[v] = Simd::max(highest[v], sum);
  }
}

// Replaces a row's scores by x, and by -inf from the last key to the end of its panel. Returns the highest x. `step` is 0 if
// `mask` is one number for all keys.
inline float add_masks(float* row, int64_t keys, float factor, const float* mask, int64_t step) {
  const Simd::reg scale = Simd::set(factor);
  alignas(64) float other[kPanel], scores[kPanel] = {};
  const int64_t whole = keys / kPanel * kPanel, left = keys - whole;
  Simd::reg highest[kVectors];
  for (Simd::reg& each : highest) each = Simd::set(-kInfinity);
  if (step == 0) {
    for (int v = 0; v < kPanel; v += Simd::kLanes) Simd::store(other + v, Simd::broadcast(mask));
  }
  for (int64_t key = 0; key < whole; key += kPanel) {
    add_mask(row + key, scale, step == 0 ? other : mask + key, row + key, highest);
  }
  if (left != 0) {
    for (int i = 0; i < kPanel; ++i) other[i] = i < left ? mask[(whole + i) * step] : -kInfinity;
    copy(row + whole, left, scores);
    add_mask(scores, scale, other, row + whole, highest);
  }
  return fold(highest, Highest());
}

// 2^-16 e^t for t <= 0; it becomes zero where that rounds to zero.
inline Simd::reg exponential(Simd::reg t) {
  t = Simd::max(Simd::set(-110.0f), t);
  // log2(e), in two parts
  const Simd::reg raised = exp2_raised(t, Simd::set(1.44269502f), t, Simd::set(1.92596303e-08f));
  return Simd::mul(raised, Simd::set(kLowered * 0x1p-16f));
}

// 2^-16 e^t for t <= 0 in bf16's arithmetic, where p is rounded to 8 bits: 2^f of degree 3, |relative error| <= 2^-13.2. Zero
// below the smallest normal number; the thread takes subnormals for zero.
inline Simd::reg rough_exponential(Simd::reg t) {
  t = Simd::max(Simd::set(-76.9f), t);
  // As in exp2_raised: the biased exponent of 2^n; it is 0 if 2^n is subnormal.
  const Simd::reg magic = Simd::set(12582912.0f + 127 - 16), factor = Simd::set(1.44269502f);
  const Simd::reg biased = Simd::fma(t, factor, magic);
  const Simd::reg f = Simd::fms(t, factor, Simd::sub(biased, magic));
  // Minimax in relative error for |f| <= 0.5 (linear programming). The first coefficient is fixed at 1. The others were
  // rounded to fp32 one after the other, and the rest fitted again each time.
  Simd::reg p = Simd::set(0x1.c2a246p-5f);
  p = Simd::fma(p, f, Simd::set(0x1.f00c4ap-3f));
  p = Simd::fma(p, f, Simd::set(0x1.62f5fap-1f));
  p = Simd::fma(p, f, Simd::set(1.0f));
  return Simd::mul(p, Simd::to_exponent(biased));
}

// Sums the numbers as a tree: adds the second half to the first, and so on.
template <int kCount>
float tree(float (&numbers)[kCount]) {
#pragma GCC unroll 8
  for (int half = kCount / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) numbers[i] = numbers[i] + numbers[i + half];
  }
  return numbers[0];
}

// Replaces a row's x by p, up to the end of its last panel. Returns the sum of p.
inline float soften_exactly(float* row, int64_t keys, float highest) {
  const Simd::reg most = Simd::set(highest);
  Simd::reg sums[kVectors];
  for (Simd::reg& each : sums) each = Simd::zero();
  for (int64_t key = 0; key < keys; key += kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      float* at = row + key + v * Simd::kLanes;
      const Simd::reg p = exponential(Simd::sub(Simd::load(at), most));
      Simd::store(at, p);
      sums[v] = Simd::add(sums[v], p);
    }
  }
  return fold(sums, Sum());
}
