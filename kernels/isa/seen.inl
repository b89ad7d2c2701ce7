// Finds the keys that a tile of rows sees: keys that the mask hides from all of its rows are not computed. Included by
// attention.inl.
//
// A key counts as hidden from a row if its p is 0 whatever its score is: no scaled score is larger than `bound`, and so x is
// so far below the row's highest that the exponential is 0. Skipping the key changes no bit, and the mask may hide with any
// number. If a value is or may become infinite or NaN, no key counts as hidden, because 0 times infinity is NaN.

// The keys [begin, end); begin is a multiple of 32.
struct Seen {
  int64_t begin, end;
};

constexpr float kVanishes = 128;  // e^-128 is 0 in both arithmetics, with a margin for rounding errors
constexpr float kTooLarge = 3e38f;  // bf16 may round it to infinity

// Returns the largest magnitude in [rows, columns], or infinity if one is infinite, NaN or at least kTooLarge.
inline float largest(const float* from, int64_t stride, int64_t rows, int64_t columns) {
  Simd::reg most = Simd::zero(), spoilt = Simd::zero();  // spoilt: NaN if a value is not finite, because max ignores NaN
  alignas(64) float rest[Simd::kLanes] = {};
  for (int64_t row = 0; row < rows; ++row, from += stride) {
    for (int64_t i = 0; i < columns; i += Simd::kLanes) {
      const int64_t left = columns - i;
      if (left < Simd::kLanes) copy(from + i, left, rest);
      const Simd::reg x = Simd::load(left < Simd::kLanes ? rest : from + i);
      most = Simd::max(Simd::abs(x), most);
      spoilt = Simd::fma(x, Simd::zero(), spoilt);
    }
  }
  alignas(64) float highest[Simd::kLanes], sums[Simd::kLanes];
  Simd::store(highest, most);
  Simd::store(sums, spoilt);
  float found = 0;
  for (int i = 0; i < Simd::kLanes; ++i) {
    if (!(sums[i] == 0 && highest[i] < kTooLarge)) return kInfinity;
    if (highest[i] > found) found = highest[i];
  }
  return found;
}

// Returns the highest value of a row of the mask. If the row contains NaN, it may return less, or NaN: fewer keys are then
// hidden.
inline float highest_of(const float* mask, int64_t keys) {
  Simd::reg highest[kVectors];
  for (Simd::reg& each : highest) each = Simd::set(-kInfinity);
  const int64_t whole = keys / kPanel * kPanel;
  for (int64_t key = 0; key < whole; key += kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) highest[v] = Simd::max(highest[v], Simd::load(mask + key + v * Simd::kLanes));
  }
  float most = fold(highest, Highest());
  for (int64_t key = whole; key < keys; ++key) most = most > mask[key] ? most : mask[key];
  return most;
}

// Returns whether a key of a panel may be seen. A key whose mask is below `limit` is hidden.
inline bool any_counts(const float* mask, int64_t count, float limit) {
  int counting = 0;
  if (count >= kPanel) {
    for (int i = 0; i < kPanel; ++i) counting |= !(mask[i] < limit);
  } else {
    for (int64_t i = 0; i < count; ++i) counting |= !(mask[i] < limit);
  }
  return counting != 0;
}

// Returns the keys that rows [first, first + rows) see, in whole panels, if no scaled score is larger than `bound`.
inline Seen seen_by(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, float bound) {
  int64_t begin = a.keys, end = 0;
  const float* before = nullptr;
  for (int64_t m = first; m < first + rows && (begin > 0 || end < a.keys); ++m) {
    const Row row(a, part, m);
    const float* mask = row_of(a.mask, part.batch, row.head, row.query);
    if (mask == before) continue;
    before = mask;
    const float most = highest_of(mask, a.keys);
    const float limit = most - (2.04f * bound + kVanishes + 1e-6f * std::fabs(most));
    const auto counts = [&](int64_t key) { return any_counts(mask + key, a.keys - key, limit); };
    int64_t last = (a.keys - 1) / kPanel * kPanel, start = 0;
    while (last >= end && !counts(last)) last -= kPanel;
    if (last >= end) end = last + kPanel;
    while (start < begin && !counts(start)) start += kPanel;
    if (start < begin) begin = start;
  }
  return {begin, end < a.keys ? end : a.keys};
}
