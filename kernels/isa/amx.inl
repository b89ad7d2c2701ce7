// fp32 products with AMX, whose tiles can only multiply bf16. Included after a struct Simd, activation.inl and a struct Tile.
// isa/amx.cpp has a Tile of the real instructions, tests/amx_model.h one that models them as published.
//
// x is split into three bf16 parts whose sum is x: 3 * 8 bits of its 24. Each part is multiplied by the bf16 weight, and all
// products are added in fp32. So the error is that of fp32, not that of rounding x to bf16. The order of summation differs from
// tile.inl's: TDPBF16PS adds the even and the odd of 32 products in two chains from zero, adds the two, then adds the result to
// the accumulator. So this path's bits differ from the others', but are the same for a row in any batch and for any threads:
//     total = 0;  for each 128 rows of the weight:
//                   sum = 0;  for each 32 of them, for x's low, middle and high part:  sum += (even chain + odd chain);
//                   total += sum
// It also differs because tiles treat subnormals as zero, and if a weight is infinite: parts of x may be 0, and 0 * inf is NaN.
//
// Tile has: current(), which returns the TileConfig in effect; configure(const TileConfig&); zero<t>(), load<t>(from, stride),
// store<t>(to, stride), dot<c, a, b>(): tile c += tile a · tile b.

constexpr int kTileRows = 16, kTileDepth = 32, kTileColumns = 16;
constexpr int kSplit = 3;
constexpr int kTileA = 6, kTileB = 7;  // tiles 0 to 5 hold the sums: three times 16 rows, two halves of a panel
constexpr int kTileBytes = 64;         // bytes in a row of each tile

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

// Configures this thread's tiles for a part during its lifetime. Then it restores the previous configuration, with empty tiles,
// because another library may have configured them and rely on that.
class Configured {
 public:
  explicit Configured(int64_t rows) : before_(Tile::current()) { Tile::configure(TileRows(rows).config()); }
  ~Configured() { Tile::configure(before_); }
  Configured(const Configured&) = delete;

 private:
  TileConfig before_;
};

// Returns the upper 16 bits: the number rounded toward zero to bf16, which never overflows.
inline uint16_t upper(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

inline float widened(uint16_t stored) {
  const uint32_t bits = static_cast<uint32_t>(stored) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Splits x so that x = parts[0] + parts[1] + parts[2], exactly unless the last is subnormal. If x is not finite, only the first
// part is not zero.
inline void split(float x, uint16_t (&parts)[kSplit]) {
  parts[0] = upper(x);
  parts[1] = parts[2] = 0;
  if ((parts[0] & 0x7f80) == 0x7f80) {
    if (x != x) parts[0] |= 0x40;  // keep a NaN whose payload is only in the lower bits
    return;
  }
  const float rest = x - widened(parts[0]);
  parts[1] = upper(rest);
  parts[2] = upper(rest - widened(parts[1]));
}

// Interleaves pairs of rows of a block [length, 32] for the tiles: [steps * 16, 32] pairs along K, padded with zeros.
inline void pair_rows(const uint16_t* w, int length, int steps, uint32_t* pairs) {
  for (int row = 0; row < steps * kTileDepth; row += 2, pairs += kPanel) {
    const uint16_t* even = w + row * kPanel;
    if (row + 1 < length) {
      for (int n = 0; n < kPanel; ++n) pairs[n] = even[n] | static_cast<uint32_t>(even[kPanel + n]) << 16;
    } else {
      for (int n = 0; n < kPanel; ++n) pairs[n] = row < length ? even[n] : 0u;
    }
  }
}

// The operands of one chain's tiles.
struct TileOperands {
  const uint16_t* a;  // [rows, kSplit, kChain], rows `stride` bytes apart
  int64_t stride;
  const uint32_t* pairs;
  int steps;  // each of 32 rows of the weight
};

template <int kRowTile, int kHalf>
void multiply_tile(const TileOperands& operands, const TileRows& rows, const uint16_t* a) {
  Tile::template load<kTileA>(reinterpret_cast<const char*>(a) + rows.first(kRowTile) * operands.stride, operands.stride);
  Tile::template dot<2 * kRowTile + kHalf, kTileA, kTileB>();
}

// Multiplies one half of a panel with all rows, so that each tile of the weight is loaded once.
template <int kTiles, int kHalf>
void multiply_half(const TileOperands& operands, const TileRows& rows, int step) {
  constexpr int64_t kStride = kPanel * sizeof(uint32_t);
  Tile::template load<kTileB>(operands.pairs + step * kTileDepth / 2 * kPanel + kHalf * kTileColumns, kStride);
  for (int part = kSplit - 1; part >= 0; --part) {  // the smallest part first
    const uint16_t* a = operands.a + part * kChain + step * kTileDepth;
    multiply_tile<0, kHalf>(operands, rows, a);
    if constexpr (kTiles > 1) multiply_tile<1, kHalf>(operands, rows, a);
    if constexpr (kTiles > 2) multiply_tile<2, kHalf>(operands, rows, a);
  }
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

template <Arithmetic kArithmetic>
struct Tiles;

// Specialised for kBf16 because the tiles multiply bf16, although the product is in fp32.
template <>
struct Tiles<Arithmetic::kBf16> {
  // Room for the three parts of a value. In memory come the first parts of a whole chain, then the second, then the third.
  struct Element {
    uint16_t room[kSplit];
  };
  static constexpr int kValues = 1;
  static constexpr int kRows = kRowBlock;  // all rows of a part, so that the weight's pairs are interleaved only once
  static constexpr int kTwoPanelRows = 0;

  static void copy(const float* from, int64_t length, Element* to) {
    uint16_t* parts = to->room;
    std::memset(parts, 0, sizeof(Element) * kChain);
    for (int64_t i = 0; i < length; ++i) {
      uint16_t each[kSplit];
      split(from[i], each);
      for (int part = 0; part < kSplit; ++part) parts[part * kChain + i] = each[part];
    }
  }

  static void add(int count, int, const Element* a, int64_t lda, const Block& block, float* total, const Ahead& ahead) {
    alignas(64) uint32_t pairs[kChain / 2 * kPanel];
    alignas(64) float sums[kRowBlock * kPanel];
    const int steps = (block.length + kTileDepth - 1) / kTileDepth;
    pair_rows(block.w, block.length, steps, pairs);
    for (int row = 0; row < block.length; ++row) __builtin_prefetch(ahead.from + row * ahead.stride);
    const TileRows rows(count);
    const TileOperands operands = {a->room, lda * static_cast<int64_t>(sizeof(Element)), pairs, steps};
    (rows.tiles == 1 ? multiply_chain<1> : rows.tiles == 2 ? multiply_chain<2> : multiply_chain<3>)(operands, rows, sums);
    for (int64_t i = 0; i < count * kPanel; i += Simd::kLanes) {
      const typename Simd::reg before = block.first ? Simd::zero() : Simd::load(total + i);
      Simd::store(total + i, Simd::add(before, Simd::load(sums + i)));
    }
  }

  static void in_order(const float* totals, float* row) { std::memcpy(row, totals, sizeof(float) * kPanel); }
};

#include "part.inl"

bool compute_in_tiles(const Product& product, const Part& part) {
  const RoundingMode mode(Arithmetic::kFp32);
  const Configured configured(part.rows);
  return compute_part<Arithmetic::kBf16>(product, part);
}
