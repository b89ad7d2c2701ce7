// bf16 products with AMX's tiles. Included after a struct Simd, activation.inl, tile.inl and dots.inl in a namespace `dots`,
// and a struct Tile. isa/amx.cpp has a Tile of the real instructions, tests/amx_model.h one that models them as published.
//
// x is rounded as in dots.inl. The order of summation is TDPBF16PS's, which differs from tile.inl's: it adds the even and the odd
// of 32 products in two chains from zero, adds the two, then adds the result to the accumulator. Subnormal operands and results
// are zero. So this path's bits differ from the others', but are the same for a row in any batch and for any threads:
//     total = 0;  for each 128 rows of the weight:
//                   sum = 0;  for each 32 of them (zeros are added at the end):  sum += (even chain + odd chain)
//                   total += sum
// A part of few rows is computed with vdpbf16ps instead, in the same order, so that its bits are the same.
//
// Tile has: current(), which returns the TileConfig in effect; configure(const TileConfig&); release(); zero<t>(),
// load<t>(from, stride), store<t>(to, stride), dot<c, a, b>(): tile c += tile a · tile b.

constexpr int kTileRows = 16, kTileDepth = 32, kTileColumns = 16;
constexpr int kTileA = 6, kTileB = 7;  // tiles 0 to 5 hold the sums: three times 16 rows, two halves of a panel
constexpr int kTileBytes = 64;         // bytes in a row of each tile

// Up to this number of rows, vdpbf16ps is used. Calculated, never timed, in cycles for a block of 128 x 32 weights in the
// first-level cache, where nothing overlaps:
//   tiles of up to 16 rows: the block's rows are interleaved by 128 shuffles and stores, one a cycle = 128; then 8 TDPBF16PS of 16
//     each = 128, while 12 TILELOADD of 8 each run beside them. Together 256, besides LDTILECFG and TILERELEASE for each part.
//   vdpbf16ps, r rows: 128 shuffles, 128 r dot products and an eighth of that in additions, two a cycle = 64 + 72 r.
// These are equal at 2.7 rows. If the block comes from memory (8 KiB at 20 bytes a nanosecond: more than 1000 cycles), as it does
// where few rows matter, both wait for it. 48 rows: tiles 24 TDPBF16PS of 16 + 128 = 512; vdpbf16ps in its own order 3136.
constexpr int kDotRows = 3;

using dots::Ahead;
using dots::Block;
using dots::Pairs16;

// The configuration in the format of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "what LDTILECFG reads");

// Assigns the rows of a part to tiles: as few tiles as possible, all of the same height. If the height does not divide the rows,
// the last tile begins earlier and computes some rows a second time.
struct TileRows {
  int tiles, height;
  int64_t rows;

  explicit TileRows(int64_t of)
      : tiles(static_cast<int>((of + kTileRows - 1) / kTileRows)),
        height(static_cast<int>((of + tiles - 1) / tiles)),
        rows(of) {}

  int64_t first(int tile) const { return tile * height < rows - height ? tile * height : rows - height; }

  TileConfig config() const {
    TileConfig config;
    const auto set = [&](int tile, int rows) {
      config.rows[tile] = static_cast<uint8_t>(rows);
      config.bytes[tile] = kTileBytes;
    };
    for (int t = 0; t < 2 * tiles; ++t) set(t, height);
    set(kTileA, height);
    set(kTileB, kTileDepth / 2);
    return config;
  }
};

// Configures this thread's tiles for a part during its lifetime. Then releases them, so that the system need not save them; or
// restores the previous configuration, with empty tiles, because another library may have configured them and rely on that.
class Configured {
 public:
  explicit Configured(int64_t rows) : before_(Tile::current()) { Tile::configure(TileRows(rows).config()); }
  ~Configured() { before_.palette == 0 ? Tile::release() : Tile::configure(before_); }
  Configured(const Configured&) = delete;

 private:
  TileConfig before_;
};

inline __m512i row_of(const Block& block, int row) {
  return row < block.length ? _mm512_loadu_si512(block.w + row * kPanel) : _mm512_setzero_si512();
}

// Interleaves pairs of rows of a block [length, 32] for the tiles: [steps * 16, 32] pairs along K, padded with zeros. The columns
// are in the order of the shuffles, as in dots.inl.
inline void pair_rows(const Block& block, int steps, uint32_t* pairs) {
  for (int row = 0; row < steps * kTileDepth; row += 2, pairs += kPanel) {
    const __m512i even = row_of(block, row), odd = row_of(block, row + 1);
    _mm512_store_si512(pairs, _mm512_unpacklo_epi16(even, odd));
    _mm512_store_si512(pairs + kTileColumns, _mm512_unpackhi_epi16(even, odd));
  }
}

// The operands of one chain's tiles.
struct TileOperands {
  const Pairs16* a;  // [rows, kChain], rows `stride` bytes apart
  int64_t stride;
  const uint32_t* pairs;
  int steps;  // each of 32 rows of the weight
};

template <int kRowTile, int kHalf>
void multiply_tile(const TileOperands& operands, const TileRows& rows, int step) {
  const Pairs16* a = operands.a + step * kTileDepth / 2;
  Tile::template load<kTileA>(reinterpret_cast<const char*>(a) + rows.first(kRowTile) * operands.stride, operands.stride);
  Tile::template dot<2 * kRowTile + kHalf, kTileA, kTileB>();
}

// Multiplies one half of a panel with all rows, so that each tile of the weight is loaded once.
template <int kTiles, int kHalf>
void multiply_half(const TileOperands& operands, const TileRows& rows, int step) {
  constexpr int64_t kStride = kPanel * sizeof(uint32_t);
  Tile::template load<kTileB>(operands.pairs + step * kTileDepth / 2 * kPanel + kHalf * kTileColumns, kStride);
  multiply_tile<0, kHalf>(operands, rows, step);
  if constexpr (kTiles > 1) multiply_tile<1, kHalf>(operands, rows, step);
  if constexpr (kTiles > 2) multiply_tile<2, kHalf>(operands, rows, step);
}

template <int kRowTile>
void store_tiles(const TileRows& rows, float* sums) {
  float* to = sums + rows.first(kRowTile) * kPanel;
  Tile::template store<2 * kRowTile>(to, kPanel * sizeof(float));
  Tile::template store<2 * kRowTile + 1>(to + kTileColumns, kPanel * sizeof(float));
}

template <int kRowTile>
void zero_tiles() {
  Tile::template zero<2 * kRowTile>();
  Tile::template zero<2 * kRowTile + 1>();
}

// sums[rows, 32] = a · w for one chain.
template <int kTiles>
void multiply_chain(const TileOperands& operands, const TileRows& rows, float* sums) {
  zero_tiles<0>();
  if constexpr (kTiles > 1) zero_tiles<1>();
  if constexpr (kTiles > 2) zero_tiles<2>();
  for (int step = 0; step < operands.steps; ++step) {
    multiply_half<kTiles, 0>(operands, rows, step);
    multiply_half<kTiles, 1>(operands, rows, step);
  }
  store_tiles<0>(rows, sums);
  if constexpr (kTiles > 1) store_tiles<1>(rows, sums);
  if constexpr (kTiles > 2) store_tiles<2>(rows, sums);
}

// sums[kRows, 32] = a · w for one chain with vdpbf16ps, in the order of the tiles. vdpbf16ps adds the odd value of a pair, then
// the even one. So a pair of rows k + 2 and k continues the even chain, a pair of rows k + 3 and k + 1 the odd one.
template <int kRows>
void dot_chain(const Pairs16* a, int64_t lda, const Block& block, float* sums) {
  alignas(64) Pairs16 x[kRows][kChain / 2];
  const int steps = (block.length + kTileDepth - 1) / kTileDepth;
  Simd::reg all[kRows][2];
  for (int m = 0; m < kRows; ++m) {
    all[m][0] = all[m][1] = Simd::zero();
    for (int i = 0; i < steps * kTileDepth / 2; i += 16) {  // values 0, 1, 2, 3 become the pairs 2, 0 and 3, 1
      const __m512i low = _mm512_shufflelo_epi16(_mm512_loadu_si512(a + m * lda + i), 0x72);
      _mm512_store_si512(&x[m][i], _mm512_shufflehi_epi16(low, 0x72));
    }
  }
  for (int step = 0; step < steps; ++step) {
    Simd::reg chains[kRows][2][2];
#pragma GCC unroll 3
    for (int m = 0; m < kRows; ++m) chains[m][0][0] = chains[m][0][1] = chains[m][1][0] = chains[m][1][1] = Simd::zero();
    for (int k = step * kTileDepth; k < (step + 1) * kTileDepth; k += 4) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const __m512i now = row_of(block, k + odd), later = row_of(block, k + odd + 2);
        const __m512i low = _mm512_unpacklo_epi16(later, now), high = _mm512_unpackhi_epi16(later, now);
#pragma GCC unroll 3
        for (int m = 0; m < kRows; ++m) {
          chains[m][0][odd] = dots::dot(dots::pair_of(&x[m][k / 2 + odd]), low, chains[m][0][odd]);
          chains[m][1][odd] = dots::dot(dots::pair_of(&x[m][k / 2 + odd]), high, chains[m][1][odd]);
        }
      }
    }
#pragma GCC unroll 3
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        all[m][half] = Simd::add(all[m][half], Simd::add(chains[m][half][0], chains[m][half][1]));
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    Simd::store(sums + m * kPanel, all[m][0]);
    Simd::store(sums + m * kPanel + Simd::kLanes, all[m][1]);
  }
}

template <Arithmetic kArithmetic>
struct Tiles;

template <>
struct Tiles<Arithmetic::kBf16> : dots::Tiles<Arithmetic::kBf16> {
  static constexpr int kRows = kRowBlock;  // all rows of a part, so that the weight's pairs are interleaved only once
  static constexpr int kTwoPanelRows = 0;
  static constexpr bool kHalves = false;

  static void copy(const float* from, int64_t length, Pairs16* to) {
    dots::Tiles<Arithmetic::kBf16>::copy(from, length, to);
    for (int64_t i = (length + 1) / 2; i % (kTileDepth / 2) != 0; ++i) to[i] = 0;
  }

  static void add(int count, int64_t, const Pairs16* a, int64_t lda, const Block& block, float* total, const Ahead& ahead) {
    alignas(64) float sums[kRowBlock * kPanel];
    for (int row = 0; row < block.length; ++row) __builtin_prefetch(ahead.from + row * ahead.stride);
    if (count <= kDotRows) {
      (count == 1 ? dot_chain<1> : count == 2 ? dot_chain<2> : dot_chain<3>)(a, lda, block, sums);
    } else {
      alignas(64) uint32_t pairs[kChain / 2 * kPanel];
      const int steps = (block.length + kTileDepth - 1) / kTileDepth;
      pair_rows(block, steps, pairs);
      const TileRows rows(count);
      const TileOperands operands = {a, lda * static_cast<int64_t>(sizeof(Pairs16)), pairs, steps};
      (rows.tiles == 1 ? multiply_chain<1> : rows.tiles == 2 ? multiply_chain<2> : multiply_chain<3>)(operands, rows, sums);
    }
    for (int64_t i = 0; i < count * kPanel; i += Simd::kLanes) {
      const typename Simd::reg before = block.first ? Simd::zero() : Simd::load(total + i);
      Simd::store(total + i, Simd::add(before, Simd::load(sums + i)));
    }
  }
};

#include "part.inl"

bool compute_in_tiles(const Product& product, const Part& part) {
  if (part.rows <= kDotRows) return compute<Arithmetic::kBf16>(product, part);
  const Configured configured(part.rows);
  return compute<Arithmetic::kBf16>(product, part);
}
