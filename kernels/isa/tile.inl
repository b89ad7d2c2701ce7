// The multiplication itself, for any instruction set. Included by each isa/*.cpp inside its own namespace, after the
// struct Simd of that set; everything here is therefore compiled once per path, with that path's instructions.
//
// The order of summation is part of the interface: every element of y is
//     total = 0;  for each 128 rows of the weight:  chain = 0;  for each row k:  chain = fma(x[k], w[k], chain);
//                                                   total += chain
//     y = activation(total + bias)
// whatever the number of rows, the batch they came in, the number of threads, and the path (the portable one may lack
// fma). Chains of 128 bound the error by (128 + K/128) unit roundoffs of sum |x||w|, where one chain of K has K.
//
// Simd has: reg, kLanes, zero, broadcast, load, store, add, fma, unpack, interleave. unpack reads 2 * kLanes bf16 of one
// row as two vectors, the even columns and the odd ones: a shift and a mask, where columns in order would need a
// shuffle for each load. interleave puts sums back in order, once for each tile.

#include "block.inl"

constexpr int kWide = kPanel / (2 * Simd::kLanes);  // pairs of vectors in a row of a panel
// Between copied rows of x: a power of two would put them all in one cache set.
constexpr int64_t kStride = kChain + 16;

template <int kRows, int kPairs>
using Sums = typename Simd::reg[kRows][kPairs][2];

// total[kRows, 32] (+)= a[kRows, length] · w[length, 2 * kPairs * kLanes], rows of a being `lda` apart; columns are
// left as unpack parts them. The first chain writes what the others add to. `ahead` is what is wanted next: `stride`
// bytes of it are asked for with every row.
template <int kRows, int kPairs>
void chain(const float* a, int64_t lda, const uint16_t* w, int length, float* total, bool first, const char* ahead,
           int stride) {
  Sums<kRows, kPairs> sums;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) sums[m][p][0] = sums[m][p][1] = Simd::zero();
  }
  // Three rows for each pointer: as many as one register of stride can address.
  const float* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
#pragma GCC unroll 2
  for (int k = 0; k < length; ++k) {
    typename Simd::reg b[kPairs][2];
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) Simd::unpack(w + k * kPanel + p * 2 * Simd::kLanes, b[p][0], b[p][1]);
    __builtin_prefetch(ahead + k * stride);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename Simd::reg x = Simd::broadcast(from[m / 3] + m % 3 * lda + k);
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        sums[m][p][0] = Simd::fma(x, b[p][0], sums[m][p][0]);
        sums[m][p][1] = Simd::fma(x, b[p][1], sums[m][p][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        float* to = total + m * kPanel + (2 * p + h) * Simd::kLanes;
        Simd::store(to, first ? sums[m][p][h] : Simd::add(Simd::load(to), sums[m][p][h]));
      }
    }
  }
}

using Chain = void (*)(const float*, int64_t, const uint16_t*, int, float*, bool, const char*, int);

// Rows of a tile, at most; as many as leave no register unused and none spilled.
template <int kPairs, int... kRows>
Chain chain_of(int rows, std::integer_sequence<int, kRows...>) {
  static constexpr Chain kTable[] = {chain<kRows + 1, kPairs>...};
  return kTable[rows - 1];
}

// Where a thread keeps the rows of x that it has copied; grows, and is freed when the thread ends.
struct PackedRows {
  float* data = nullptr;
  int64_t size = 0;
  uint64_t product = 0;  // whose rows are in it, and from which on
  int64_t first_row = 0;

  PackedRows() = default;
  PackedRows(const PackedRows&) = delete;
  ~PackedRows() { std::free(data); }

  float* get(int64_t wanted) {
    if (wanted > size) {
      std::free(data);
      size = 0;
      product = 0;
      data = static_cast<float*>(std::aligned_alloc(64, (wanted * sizeof(float) + 63) / 64 * 64));
      if (data != nullptr) size = wanted;
    }
    return data;
  }
};

// One tile's rows times one chain's rows of a panel.
void add_chain(int rows, const float* a, int64_t lda, const uint16_t* w, int length, float* total, bool first,
               const char* ahead, int bytes) {
  if (rows <= Simd::kWideRows) {
    chain_of<kWide>(rows, std::make_integer_sequence<int, Simd::kWideRows>())(a, lda, w, length, total, first, ahead,
                                                                           bytes / kChain);
    return;
  }
  if constexpr (kWide > 1) {
    const int each = bytes / kWide;
    for (int p = 0; p < kWide; ++p) {
      const int column = p * 2 * Simd::kLanes;
      chain_of<1>(rows, std::make_integer_sequence<int, Simd::kRows>())(a, lda, w + column, length, total + column, first,
                                                                     ahead + p * each, each / kChain);
    }
  }
}

// Bias, activation, and the columns in their order, from totals[rows, 32] to y[rows, width] of stride n.
template <Activation kActivation>
void finish(const Product& product, const float* totals, int64_t rows, int64_t column, int64_t width, float* y) {
  alignas(64) float bias[kPanel] = {};
  alignas(64) float row[kPanel];
  if (product.bias != nullptr) std::memcpy(bias, product.bias + column, sizeof(float) * width);
  for (int64_t m = 0; m < rows; ++m, totals += kPanel, y += product.weight.n) {
    float* to = width == kPanel ? y : row;
    for (int p = 0; p < kWide; ++p) {
      const int at = p * 2 * Simd::kLanes;
      typename Simd::reg low, high;
      Simd::interleave(Simd::load(totals + at), Simd::load(totals + at + Simd::kLanes), low, high);
      if (product.bias != nullptr) {
        low = Simd::add(low, Simd::load(bias + at));
        high = Simd::add(high, Simd::load(bias + at + Simd::kLanes));
      }
      Simd::store(to + at, activate<kActivation>(low));
      Simd::store(to + at + Simd::kLanes, activate<kActivation>(high));
    }
    if (width != kPanel) std::memcpy(y, row, sizeof(float) * width);
  }
}

using Finish = decltype(&finish<Activation::kNone>);

inline Finish finish_as(Activation activation) {
  switch (activation) {
    case Activation::kRelu: return finish<Activation::kRelu>;
    case Activation::kGelu: return finish<Activation::kGelu>;
    case Activation::kGeluTanh: return finish<Activation::kGeluTanh>;
    case Activation::kSilu: return finish<Activation::kSilu>;
    case Activation::kNone: break;
  }
  return finish<Activation::kNone>;
}

// Whether x is read where it is. Rows a multiple of 4 KiB apart would fall into the same sets of the first-level cache.
inline bool in_place(const Part& part, int64_t k) { return part.rows == 1 || k % 1024 != 0; }

// The rows of x that the part needs, where they are or copied to [chains, rows, kStride]. Null when there is no memory.
const float* gather(const Product& product, const Part& part, PackedRows& packed) {
  const int64_t k = product.weight.k;
  const float* x = product.x + part.first_row * k;
  if (in_place(part, k)) return x;
  if (packed.product == product.id && packed.first_row == part.first_row) return packed.data;
  float* copy = packed.get((k + kChain - 1) / kChain * part.rows * kStride);
  if (copy == nullptr) return nullptr;
  packed.product = product.id;
  packed.first_row = part.first_row;
  float* to = copy;
  for (int64_t first = 0; first < k; first += kChain) {
    const int64_t length = k - first < kChain ? k - first : kChain;
    for (int64_t m = 0; m < part.rows; ++m, to += kStride) std::memcpy(to, x + m * k + first, sizeof(float) * length);
  }
  return copy;
}

bool compute(const Product& product, const Part& part) {
  static thread_local PackedRows packed;
  alignas(64) float totals[kRowBlock * kPanel];
  alignas(64) uint16_t scratch[kChain * kPanel];
  const Weight& weight = product.weight;
  const float* x = gather(product, part, packed);
  if (x == nullptr) return false;
  const bool copied = !in_place(part, weight.k);
  const int64_t lda = copied ? kStride : weight.k;
  const int tiles = static_cast<int>((part.rows + Simd::kRows - 1) / Simd::kRows);
  constexpr int kBlockBytes = kChain * kPanel * sizeof(uint16_t);
  // Every tile asks for its share of the next block, so that memory works while the tiles compute.
  const int share = kBlockBytes / tiles;
  const Finish finish = finish_as(product.activation);
  for (int64_t panel = part.first_panel; panel < part.first_panel + part.panels; ++panel) {
    const int64_t column = panel * kPanel, width = weight.width(panel);
    float* y = product.y + part.first_row * weight.n + column;
    for (int64_t first = 0; first < weight.k; first += kChain) {
      const int length = static_cast<int>(weight.k - first < kChain ? weight.k - first : kChain);
      const uint16_t* w = block(weight, panel, first, length, scratch);
      // What was copied has asked for what comes after it already; asking for itself costs nothing.
      const bool stored = w != scratch;
      const char* next = reinterpret_cast<const char*>(stored ? w + length * kPanel : w);
      const float* a = x + (copied ? first * part.rows / kChain * kStride : first);
      for (int t = 0; t < tiles; ++t) {
        const int64_t begin = part.rows * t / tiles, end = part.rows * (t + 1) / tiles;
        for (int64_t m = begin; first == 0 && m < end; ++m) {  // where the sums will go
          __builtin_prefetch(y + m * weight.n, 1);
          __builtin_prefetch(y + m * weight.n + width - 1, 1);
        }
        add_chain(static_cast<int>(end - begin), a + begin * lda, lda, w, length, totals + begin * kPanel, first == 0,
                  next + (stored ? t * share : 0), stored ? share : 0);
        // While the processor still adds up the next tile's sums, if it can look that far ahead.
        if (first + kChain >= weight.k) {
          finish(product, totals + begin * kPanel, end - begin, column, width, y + begin * weight.n);
        }
      }
    }
  }
  return true;
}
