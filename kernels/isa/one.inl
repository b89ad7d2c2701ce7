// Attention of a single row that reads the keys of a head: one query, no heads that share keys, as in each step of a decoder
// with a cache. Included by attention.inl, which states the order of sums. Each key and value is used once. So both are read
// where they are, row by row, and nothing is transposed. The processor's own prefetcher follows: asking ahead was slower.
//
// Heads has, for this: kStep, the values of a row that the 16 sums of a score take at once; Lanes, a vector's share of them;
// query_lanes, read_lanes, read_rest and dot_lanes; kOneInPlace, whether v is read in place, and then read_values.

constexpr int kSums = 16;  // of a score, or of a unit in recurrent.inl
constexpr int kVectorsOfSums = kSums / Simd::kLanes;

// sums[kLanes keys, kSums] = (first ? 0 : sums) + the products of kSteps steps of q with those of each of `count` keys; then the
// last key is repeated. If `left` is not 0, only so many values of a single step are there.
template <typename H, int kSteps>
void add_steps(const Element<H>* q, const float* keys, int64_t stride, int count, bool first, float* sums, int64_t left = 0) {
  typename H::Lanes row[kSteps][kVectorsOfSums];
#pragma GCC unroll 4
  for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsOfSums; ++v) row[s][v] = H::query_lanes(q + s * (H::kStep / H::kValues), v);
  }
#pragma GCC unroll 4
  for (int key = 0; key < Simd::kLanes; ++key, sums += kSums) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsOfSums; ++v) {
      typename Simd::reg sum = first ? Simd::zero() : Simd::load(sums + v * Simd::kLanes);
#pragma GCC unroll 4
      for (int s = 0; s < kSteps; ++s) {
        const float* step = keys + s * H::kStep;
        sum = H::dot_lanes(row[s][v], left == 0 ? H::read_lanes(step, v) : H::read_rest(step, left, v), sum);
      }
      Simd::store(sums + v * Simd::kLanes, sum);
    }
    if (key + 1 < count) keys += stride;
  }
}

// Adds up the 16 sums of each of kLanes / kApart keys (or units of a recurrence) that are kApart apart, as a tree, halves first.
// Each key takes kApart lanes of the result.
template <int kApart>
inline Simd::reg fold_sums(const float* sums) {
  if constexpr (kApart == Simd::kLanes) {
    Simd::reg vectors[kVectorsOfSums];
    for (int i = 0; i < kVectorsOfSums; ++i) vectors[i] = Simd::load(sums + i * Simd::kLanes);
    for (int half = kVectorsOfSums / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) vectors[i] = Simd::add(vectors[i], vectors[i + half]);
    }
    return vectors[0];
  } else {
    Simd::reg low, high;
    Simd::interleave(fold_sums<2 * kApart>(sums), fold_sums<2 * kApart>(sums + kApart * kSums), low, high);
    return Simd::add(low, high);
  }
}

// scores[keys, rounded up to kLanes] = q[depth] · the transpose of k[keys, depth]. q has zeros after it, up to a whole step.
template <typename H>
void scores_of_one(const Element<H>* q, const float* k, int64_t stride, int64_t keys, int64_t depth, float* scores) {
  alignas(64) float sums[Simd::kLanes * kSums];
  for (int64_t key = 0; key < keys; key += Simd::kLanes, k += Simd::kLanes * stride) {
    const int count = static_cast<int>(keys - key < Simd::kLanes ? keys - key : Simd::kLanes);
    int64_t d = 0;
    const auto add = [&](auto steps) {
      constexpr int kSteps = decltype(steps)::value;
      for (; d + kSteps * H::kStep <= depth; d += kSteps * H::kStep) {
        add_steps<H, kSteps>(q + d / H::kValues, k + d, stride, count, d == 0, sums);
      }
    };
    add(std::integral_constant<int, 4>());  // as many steps of q as fit into registers
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
    if (d < depth) add_steps<H, 1>(q + d / H::kValues, k + d, stride, count, d == 0, sums, depth - d);
    Simd::store(scores + key, fold_sums<1>(sums));
  }
}

// totals[kVectors vectors] = (first ? 0 : totals) + p[keys] · v[keys, kVectors vectors]
template <typename H, int kVectors>
void add_values_of_one(const Element<H>* p, const float* v, int64_t stride, int64_t keys, float* totals, bool first) {
  typename Simd::reg sums[kVectors];
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) sums[c] = Simd::zero();
  const auto step = [&](int64_t key, bool whole) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int c = 0; c < kVectors; ++c) {
      sums[c] = H::dot(p + key / H::kValues, H::read_values(v + key * stride + c * Simd::kLanes, stride, whole), sums[c]);
    }
  };
  int64_t key = 0;
#pragma GCC unroll 2
  for (; key + H::kValues <= keys; key += H::kValues) step(key, true);
  if (key < keys) step(key, false);
#pragma GCC unroll 8
  for (int c = 0; c < kVectors; ++c) {
    float* to = totals + c * Simd::kLanes;
    Simd::store(to, Simd::add(first ? Simd::zero() : Simd::load(to), sums[c]));
  }
}

// totals[width] = p[keys] · v[keys, width], chain by chain; in a chain, as many columns together as registers hold. The width
// is a multiple of kLanes.
template <typename H>
void values_of_one(const Element<H>* p, const float* v, int64_t stride, int64_t keys, int64_t width, float* totals) {
  for (int64_t key = 0; key < keys; key += kChain) {
    const int64_t some = keys - key < kChain ? keys - key : kChain;
    int64_t column = 0;
    const auto add = [&](auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      for (; column + kVectors * Simd::kLanes <= width; column += kVectors * Simd::kLanes) {
        add_values_of_one<H, kVectors>(p + key / H::kValues, v + key * stride + column, stride, some, totals + column, key == 0);
      }
    };
    add(std::integral_constant<int, 8>());
    add(std::integral_constant<int, 4>());
    add(std::integral_constant<int, 2>());
    add(std::integral_constant<int, 1>());
  }
}
