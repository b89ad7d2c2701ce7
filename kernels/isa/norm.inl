// A residual sum and its normalisation, for any instruction set. Each isa/*.cpp includes this file in its own namespace, after
// attention.inl.
//
// The sum of a row consists of 32 sums, each of every 32nd element, which are added up as a tree. So all paths give the same
// bits (except the portable one, which may lack fma). With s = x + skip:
//     mean = sum of s / width;  off = sum of (s - mean) / width;  variance = sum of (s - mean)^2 / width - off^2
//     r = 1 / sqrt(variance + epsilon);  y = fma(((s - mean) - off) * r, scale, bias)
// `off` is the rounding error of `mean`, which is large beside the deviations if the mean is. RMS norm is the same with a mean
// and an off of 0. Without a bias, -0 is added, which does not change even the sign of a zero.

// Returns 32 elements of a row of which `width` are left: in place, or copied to `scratch` and padded with `other`.
inline const float* block_of(const float* from, int64_t width, float other, float (&scratch)[kPanel]) {
  if (width >= kPanel) return from;
  for (int i = 0; i < kPanel; ++i) scratch[i] = i < width ? from[i] : other;
  return scratch;
}

// Computes s of one row and returns its sum.
inline float add_rows(const float* x, const float* skip, int64_t width, float* s) {
  alignas(64) float left[kPanel], right[kPanel], last[kPanel];
  Simd::reg sums[kVectors];
  for (Simd::reg& each : sums) each = Simd::zero();
  for (int64_t at = 0; at < width; at += kPanel) {
    const float* a = block_of(x + at, width - at, 0, left);
    const float* b = block_of(skip + at, width - at, 0, right);
    float* to = width - at < kPanel ? last : s + at;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Simd::reg sum = Simd::add(Simd::load(a + v * Simd::kLanes), Simd::load(b + v * Simd::kLanes));
      Simd::store(to + v * Simd::kLanes, sum);
      sums[v] = Simd::add(sums[v], sum);
    }
    if (to == last) copy(last, width - at, s + at);
  }
  return fold(sums, Sum());
}

struct Deviations {
  float sum, squares;  // of s - mean, and of (s - mean)^2
};

inline Deviations deviations(const float* s, int64_t width, float mean) {
  alignas(64) float last[kPanel];
  const Simd::reg middle = Simd::set(mean);
  Simd::reg sums[kVectors], squares[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = squares[v] = Simd::zero();
  for (int64_t at = 0; at < width; at += kPanel) {
    const float* from = block_of(s + at, width - at, mean, last);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Simd::reg off = Simd::sub(Simd::load(from + v * Simd::kLanes), middle);
      sums[v] = Simd::add(sums[v], off);
      squares[v] = Simd::fma(off, off, squares[v]);
    }
  }
  return {fold(sums, Sum()), fold(squares, Sum())};
}

inline void scale_row(const Norm& norm, const float* s, float mean, float off, float factor, float* y) {
  alignas(64) float values[kPanel], scales[kPanel], biases[kPanel], last[kPanel];
  for (float& each : biases) each = -0.0f;
  const Simd::reg middle = Simd::set(mean), error = Simd::set(off), r = Simd::set(factor);
  for (int64_t at = 0; at < norm.width; at += kPanel) {
    const int64_t left = norm.width - at;
    const float* from = block_of(s + at, left, mean, values);
    const float* scale = block_of(norm.scale + at, left, 0, scales);
    const float* bias = norm.bias == nullptr ? biases : block_of(norm.bias + at, left, 0, biases);
    float* to = left < kPanel ? last : y + at;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const int i = v * Simd::kLanes;
      const Simd::reg normal = Simd::mul(Simd::sub(Simd::sub(Simd::load(from + i), middle), error), r);
      Simd::store(to + i, Simd::fma(normal, Simd::load(scale + i), Simd::load(bias + i)));
    }
    if (to == last) copy(last, left, y + at);
  }
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode that normalise() sets.
__attribute__((noinline)) void normalise_rows(const Norm& norm, int64_t first, int64_t rows) {
  const auto width = static_cast<float>(norm.width);
  for (int64_t row = first; row < first + rows; ++row) {
    const int64_t start = row * norm.width;
    float* y = norm.y + start;
    const float* s = norm.x + start;
    float mean = 0;
    if (norm.skip != nullptr) {
      float* sum = norm.sum == nullptr ? y : norm.sum + start;
      const float total = add_rows(s, norm.skip + start, norm.width, sum);
      if (norm.kind == NormKind::kLayer) mean = total / width;
      s = sum;
    }
    const Deviations found = deviations(s, norm.width, mean);
    const float off = norm.kind == NormKind::kLayer ? found.sum / width : 0;
    float variance = found.squares / width - off * off;
    if (variance < 0) variance = 0;  // by rounding, in a row of equal elements; NaN stays
    scale_row(norm, s, mean, off, 1 / __builtin_sqrtf(variance + norm.epsilon), y);
  }
}

void normalise(const Norm& norm, int64_t first, int64_t rows) {
  const RoundingMode mode(Arithmetic::kFp32);
  normalise_rows(norm, first, rows);
}
