// A model of the tile instructions that isa/amx.inl uses, as published in Intel's manual, one number at a time. Included instead
// of the struct Tile of isa/amx.cpp.

struct TileConfig;

// What the model does wrong, for the tests of the self-check.
enum class Fault { kNone, kOneChain, kSubnormals, kOnePlace };

// The tile state of one thread. The configuration is kept as the 64 bytes that LDTILECFG reads.
struct TileState {
  uint8_t config[64] = {};
  float values[8][16][16] = {};  // tiles of 16 rows of 64 bytes
  Fault fault = Fault::kNone;

  int rows(int tile) const { return config[0] == 0 ? 0 : config[48 + tile]; }
  int bytes(int tile) const { return config[0] == 0 ? 0 : config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }
};

inline TileState& tile_state() {
  static thread_local TileState state;
  return state;
}

// Reports a failure where a processor would raise an exception.
inline void wants(bool condition, const char* what) {
  if (!condition) fail("tiles", what);
}

inline float no_subnormal(float value) {
  if (tile_state().fault == Fault::kSubnormals) return value;
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}

// Fused, rounded to nearest; subnormal operands and results are zero.
inline float tile_fma(float a, float b, float c) {
  return no_subnormal(__builtin_fmaf(no_subnormal(a), no_subnormal(b), no_subnormal(c)));
}
inline float tile_add(float a, float b) { return no_subnormal(no_subnormal(a) + no_subnormal(b)); }

struct Tile {
  static inline TileConfig current();
  static inline void configure(const TileConfig& config);
  static inline void release();

  template <int kTile>
  static void zero() {
    wants(tile_state().rows(kTile) > 0, "TILEZERO of a tile that is not set up");
    std::memset(tile_state().values[kTile], 0, sizeof tile_state().values[kTile]);
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    TileState& state = tile_state();
    wants(state.rows(kTile) > 0, "TILELOADD of a tile that is not set up");
    std::memset(state.values[kTile], 0, sizeof state.values[kTile]);
    for (int row = 0; row < state.rows(kTile); ++row) {
      std::memcpy(state.values[kTile][row], static_cast<const char*>(from) + row * stride, state.bytes(kTile));
    }
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    TileState& state = tile_state();
    wants(state.rows(kTile) > 0, "TILESTORED of a tile that is not set up");
    for (int row = 0; row < state.rows(kTile); ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, state.values[kTile][row], state.bytes(kTile));
    }
  }

  // TDPBF16PS: two chains from zero, one of the even products and one of the odd; then their sum; then that plus the accumulator.
  template <int kSum, int kA, int kB>
  static void dot() {
    TileState& state = tile_state();
    wants(state.rows(kSum) == state.rows(kA), "TDPBF16PS: the sums and a have not the same rows");
    wants(state.bytes(kSum) == state.bytes(kB), "TDPBF16PS: the sums and b have not the same columns");
    wants(state.bytes(kA) == 4 * state.rows(kB), "TDPBF16PS: a has not as many pairs in a row as b has rows");
    const auto half = [](const float* row, int i) {
      uint16_t stored;
      std::memcpy(&stored, reinterpret_cast<const char*>(row) + 2 * i, sizeof stored);
      return static_cast<float>(widen(stored));
    };
    const RoundingMode mode(Arithmetic::kFp32);  // tiles ignore MXCSR, and what it says about subnormals
    for (int m = 0; m < state.rows(kSum); ++m) {
      for (int n = 0; n < state.bytes(kSum) / 4; ++n) {
        float chains[2] = {0, 0};
        for (int k = 0; k < 2 * state.rows(kB); ++k) {
          if (state.fault == Fault::kOnePlace && m == 12 && n == 15 && k % 2 == 1) continue;
          float& chain = chains[state.fault == Fault::kOneChain ? 0 : k % 2];
          chain = tile_fma(half(state.values[kA][m], k), half(state.values[kB][k / 2], 2 * n + k % 2), chain);
        }
        state.values[kSum][m][n] = tile_add(state.values[kSum][m][n], tile_add(chains[0], chains[1]));
      }
    }
  }
};
