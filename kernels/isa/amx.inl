// Products in fp32 by tiles of bf16 (AMX), for processors whose tiles multiply bf16 only. Included after a struct Simd,
// activation.inl and a struct Tile: isa/amx.cpp has the instructions, tests/amx_model.h what they are published to do.
//
// x is parted into three bf16 whose sum it is: 3 * 8 bits of the 24. Each is multiplied by the weight, which is bf16, and
// all are added up in fp32, so the error is that of fp32 and not that of x rounded to bf16. The order of summation is not
// tile.inl's: TDPBF16PS adds the even and the odd of 32 products in two chains from zero, adds these, then adds that to
// what it had. So this path has bits of its own, the same for a row in any batch and with any number of threads:
//     total = 0;  for each 128 rows of the weight:
//                   sum = 0;  for each 32 of them, for x's low, middle and high part:  sum += (even chain + odd chain);
//                   total += sum
// It differs from the others where tiles take subnormals for zero, and where a weight is infinite: 0 * inf is NaN, and two
// parts of most x are 0.
//
// Tile has: configure(const TileConfig&), before it what was there in a TileConfig from current(); zero<t>(), load<t>(from,
// stride), store<t>(to, stride), dot<c, a, b>(): tile c += tile a · tile b.

constexpr int kTileRows = 16, kTileDepth = 32, kTileColumns = 16;
constexpr int kSplit = 3;
constexpr int kTileA = 6, kTileB = 7;  // 0 to 5 have the sums: three times 16 rows, two halves of a panel
constexpr int kTileBytes = 64;         // of a row, in every tile

// As LDTILECFG reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "what LDTILECFG reads");

// How the rows of a part lie in tiles: as few tiles as possible, all of one height. The last begins early where they do not
// divide, and computes some rows a second time.
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

// The tiles of this thread, set up for a part as long as it lives. Afterwards they are as they were, empty: another library
// may have set them up for its own products and count on it.
class Configured {
 public:
  explicit Configured(int64_t rows) : before_(Tile::current()) { Tile::configure(TileRows(rows).config()); }
  ~Configured() { Tile::configure(before_); }
  Configured(const Configured&) = delete;

 private:
  TileConfig before_;
};

// The upper 16 bits: the number rounded toward zero, which never overflows.
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

// x = parts[0] + parts[1] + parts[2], exactly, unless the last is subnormal. Of what is not finite there is one part only.
inline void split(float x, uint16_t (&parts)[kSplit]) {
  parts[0] = upper(x);
  parts[1] = parts[2] = 0;
  if ((parts[0] & 0x7f80) == 0x7f80) {
    if (x != x) parts[0] |= 0x40;  // a NaN whose bits are all lower ones
    return;
  }
  const float rest = x - widened(parts[0]);
  parts[1] = upper(rest);
  parts[2] = upper(rest - widened(parts[1]));
}

// Pairs of rows of a block [length, 32] as tiles read them: [steps * 16, 32] pairs along K, zeros below.
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

// What one chain's tiles multiply.
struct TileOperands {
  const uint16_t* a;  // [rows, kSplit, kChain], rows `stride` bytes apart
  int64_t stride;
  const uint32_t* pairs;
  int steps;  // of 32 rows of the weight
};

template <int kRowTile, int kHalf>
void multiply_tile(const TileOperands& operands, const TileRows& rows, const uint16_t* a) {
  Tile::template load<kTileA>(reinterpret_cast<const char*>(a) + rows.first(kRowTile) * operands.stride, operands.stride);
  Tile::template dot<2 * kRowTile + kHalf, kTileA, kTileB>();
}

// One half of a panel, all rows: each tile of the weight is loaded once.
template <int kTiles, int kHalf>
void multiply_half(const TileOperands& operands, const TileRows& rows, int step) {
  constexpr int64_t kStride = kPanel * sizeof(uint32_t);
  Tile::template load<kTileB>(operands.pairs + step * kTileDepth / 2 * kPanel + kHalf * kTileColumns, kStride);
  for (int part = kSplit - 1; part >= 0; --part) {  // the small ones first
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

// The tiles multiply bf16, although the product is one in fp32.
template <>
struct Tiles<Arithmetic::kBf16> {
  // Room for the three parts of a value; the parts of a row's chain lie one after the other.
  struct Element {
    uint16_t room[kSplit];
  };
  static constexpr int kValues = 1;
  static constexpr int kRows = kRowBlock;  // all of a part: the weight's pairs are made once
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
