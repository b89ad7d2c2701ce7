// The operands of attention in the format of a path's tiles. Each isa/*.cpp includes this file in its own namespace, after
// part.inl and before attention.inl. A path with bf16 instructions includes heads_dots.inl instead.
//
// Heads has what Terms has, for packed operands, of which a step takes one row; Vector, of elements along a row, and dot, which
// adds a product of one; copy_row, pack_keys and pack_values; soften.

#include "softmax.inl"

template <Arithmetic kArithmetic>
struct Heads : Terms<kArithmetic> {
  using Row = float;
  using Vector = typename Simd::reg;
  static constexpr bool kRounds = kArithmetic == Arithmetic::kBf16, kOfPanels = false;
  // With few rows, each value is used once, so a copy would not pay off.
  static constexpr bool kValuesInPlace = !kRounds, kOneInPlace = !kRounds;

  static typename Broadcasts<kArithmetic>::W read(const float* w, int64_t, bool) {
    return {Simd::load(w), Simd::load(w + Simd::kLanes)};
  }
  static typename Simd::reg dot(const float* x, Vector w, typename Simd::reg sum) {
    return Simd::fma(Simd::broadcast(x), w, sum);
  }

  // For one.inl: vector v of a step of a row, of k or of q, which is rounded. In bf16, a pair is two floats.
  static constexpr int kStep = kRounds ? 32 : 16;
  struct Lanes {
    Vector odd, even;
  };
  static Lanes read_lanes(const float* step, int v) {
    if constexpr (!kRounds) {
      const Vector values = Simd::load(step + v * Simd::kLanes);
      return {values, values};
    } else {
      // A pair as one number: its upper half is the odd value.
      using Pairs = uint64_t __attribute__((vector_size(2 * sizeof(Vector))));
      using Bits = uint32_t __attribute__((vector_size(sizeof(Vector))));
      Pairs pairs;
      std::memcpy(&pairs, step + 2 * v * Simd::kLanes, sizeof pairs);
      return {rounded(Vector(__builtin_convertvector(pairs >> 32, Bits))),
              rounded(Vector(__builtin_convertvector(pairs, Bits)))};
    }
  }
  static Lanes read_rest(const float* step, int64_t left, int v) {
    alignas(64) float rest[kStep] = {};
    copy(step, left, rest);
    return read_lanes(rest, v);
  }
  static Lanes query_lanes(const float* step, int v) { return read_lanes(step, v); }
  static Vector dot_lanes(const Lanes& q, const Lanes& k, Vector sum) {
    if constexpr (kRounds) sum = Simd::fma(q.odd, k.odd, sum);
    return Simd::fma(q.even, k.even, sum);
  }
  static Vector read_values(const float* from, int64_t, bool) { return Simd::load(from); }

  static void copy_row(const float* from, int64_t length, float* to) {
    if constexpr (kRounds) {
      Broadcasts<kArithmetic>::copy(from, length, to);
    } else {
      copy(from, length, to);
    }
  }

  // Copies `count` rows of k, at most 32, to the columns of [depth, 32], padded with zeros on the right.
  static void pack_keys(const float* from, int64_t stride, int64_t count, int64_t depth, float* to) {
    if (count < kPanel) std::memset(to, 0, sizeof(float) * depth * kPanel);
    const int64_t whole_keys = count / 8 * 8, whole_depth = depth / 8 * 8;
    for (int64_t key = 0; key < whole_keys; key += 8) {
      for (int64_t d = 0; d < whole_depth; d += 8) {
        Pairs rows[8];
        for (int i = 0; i < 8; ++i) {
          rows[i] = load_pairs(reinterpret_cast<const uint16_t*>(from + (key + i) * stride + d));
        }
        transpose_pairs(rows);
        for (int i = 0; i < 8; ++i) store_pairs(reinterpret_cast<uint16_t*>(to + (d + i) * kPanel + key), rows[i]);
      }
    }
    for (int64_t key = 0; key < count; ++key) {
      for (int64_t d = key < whole_keys ? whole_depth : 0; d < depth; ++d) to[d * kPanel + key] = from[key * stride + d];
    }
    if constexpr (kRounds) Broadcasts<kArithmetic>::copy(to, depth * kPanel, to);
  }

  // Copies up to 32 columns of v to [keys, 32], padded with zeros on the right.
  static void pack_values(const float* from, int64_t stride, int64_t keys, int64_t columns, float* to) {
    if (columns < kPanel) std::memset(to, 0, sizeof(float) * keys * kPanel);
    for (int64_t key = 0; key < keys; ++key) copy_row(from + key * stride, columns, to + key * kPanel);
  }

  // Replaces a row's x by p in the order of keys, up to the end of the last panel. Returns the sum of p.
  static float soften(float* row, int64_t keys, float highest) {
    if constexpr (!kRounds) {
      return soften_exactly(row, keys, highest);
    } else {
      const Simd::reg most = Simd::set(highest);
      float sums[kPanel / 2] = {};
      for (float* at = row; at < row + keys; at += kPanel) {
        for (int v = 0; v < kPanel; v += Simd::kLanes) {
          Simd::store(at + v, rounded(rough_exponential(Simd::sub(Simd::load(at + v), most))));
        }
        for (int i = 0; i < kPanel / 2; ++i) sums[i] = sums[i] + at[2 * i + 1] + at[2 * i];
      }
      return tree(sums);
    }
  }
};
