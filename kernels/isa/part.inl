// Computes a part of a product: its tiles, chain by chain and panel by panel. Each isa/*.cpp includes this file in its own
// namespace, after tile.inl or its replacement. In BLIS's terms, a panel has NR columns (kPanel), a chain has KC rows of the
// weight (kChain), a part has MC rows (kRowBlock), and a tile has MR rows (Tiles::kRows).

#include "block.inl"
#include "pixels.inl"

// Scratch memory that is larger, in bytes, is given back when a part needs less than a quarter of it: one large request would
// otherwise hold it as long as the thread lives.
constexpr int64_t kLargeScratch = 4 << 20;

inline bool scratch_misfits(int64_t bytes, int64_t wanted) {
  return wanted > bytes || (bytes > kLargeScratch && wanted < bytes / 4);
}

// A thread's buffer for copied rows of x. It grows and shrinks by this rule, and is freed when the thread ends.
struct PackedRows {
  void* data = nullptr;
  int64_t size = 0;  // bytes
  uint64_t product = 0;  // the product whose rows it holds, and which rows
  int64_t first_row = 0, rows = 0, group = 0;

  PackedRows() = default;
  PackedRows(const PackedRows&) = delete;
  ~PackedRows() { std::free(data); }

  bool holds(const Product& wanted, const Part& part, int64_t of) const {
    return product == wanted.id && first_row == part.first_row && rows == part.rows && group == of;
  }

  // Returns room for the rows of `part` and a group, and marks the buffer as holding them. Returns null if there is no memory.
  void* get(int64_t wanted, const Product& whose, const Part& part, int64_t of) {
    if (scratch_misfits(size, wanted)) {
      std::free(data);
      size = 0;
      data = std::aligned_alloc(64, (wanted + 63) / 64 * 64);
      if (data != nullptr) size = wanted;
    }
    product = data == nullptr ? 0 : whose.id;
    first_row = part.first_row;
    rows = part.rows;
    group = of;
    return data;
  }
};

// Adds the bias and applies the activation, from totals[rows, 32] to y[rows, width], whose stride is n. Columns before `from` stay:
// they are another group's.
template <typename T, Activation kActivation>
void finish(const Product& product, const float* totals, int64_t rows, int64_t column, int64_t from, int64_t width,
            float* y) {
  constexpr int kPair = 2 * Simd::kLanes;
  alignas(64) float bias[kPanel] = {}, row[kPanel];
  if (product.bias != nullptr) std::memcpy(bias, product.bias + column, sizeof(float) * width);
  for (int64_t m = 0; m < rows; ++m, totals += kPanel, y += product.weight.n) {
    float* to = from == 0 && width == kPanel ? y : row;
    const auto put = [&](int at, typename Simd::reg sum) __attribute__((always_inline)) {
      if (product.bias != nullptr) sum = Simd::add(sum, Simd::load(bias + at));
      Simd::store(to + at, activate<kActivation>(sum));
    };
    if (T::kHalves && width <= Simd::kLanes) {
      put(0, Simd::load(totals));
    } else {
      for (int at = 0; at < width; at += kPair) {
        typename Simd::reg low, high;
        T::interleave(Simd::load(totals + at), Simd::load(totals + at + Simd::kLanes), low, high);
        put(at, low);
        put(at + Simd::kLanes, high);
      }
    }
    if (to == row) copy_few(row + from, width - from, y + from);
  }
}

using Finish = void (*)(const Product&, const float*, int64_t, int64_t, int64_t, int64_t, float*);

// The rows of x that a part needs: in place, or copied to [chains, rows, kStride]. Those of an image are copied.
template <Arithmetic kArithmetic>
struct Rows {
  using T = Tiles<kArithmetic>;
  using Element = typename T::Element;
  // The stride of copied rows. It is no power of two, which would put all rows into one cache set.
  static constexpr int64_t kStride = kChain / T::kValues + 16;

  const Element* start;
  int64_t stride;
  int64_t chain;  // elements from one chain to the next

  // Returns whether x is read in place. Not if its rows are a multiple of 4 KiB apart: they would fall into the same sets of
  // the first-level cache.
  static bool in_place(const Part& part, int64_t k) {
    return kArithmetic == Arithmetic::kFp32 && (part.rows == 1 || k % 1024 != 0);
  }

  // Copies the rows, of an image those of a group, if necessary. Returns false if there is no memory.
  bool gather(const Product& product, const Part& part, int64_t group, PackedRows& packed) {
    const int64_t k = product.weight.k;
    const float* x = product.x + part.first_row * k;
    if constexpr (kArithmetic == Arithmetic::kFp32) {
      if (product.image == nullptr && in_place(part, k)) return *this = {x, k, kChain}, true;
    }
    stride = kStride;
    chain = part.rows * kStride;
    start = static_cast<const Element*>(packed.data);
    if (packed.holds(product, part, group)) return true;
    const int64_t chains = (k + kChain - 1) / kChain;
    const int64_t window = product.image == nullptr ? 0 : k * static_cast<int64_t>(sizeof(float));
    auto* to = static_cast<Element*>(packed.get(chains * chain * sizeof(Element) + window, product, part, group));
    start = to;
    if (to == nullptr) return false;
    // Row by row, in the order of memory. Chain by chain would read pieces of 512 bytes, which no prefetcher follows.
    for (int64_t m = 0; m < part.rows; ++m) {
      const float* row = x + m * k;
      if (product.image != nullptr) {
        auto* copied = reinterpret_cast<float*>(to + chains * chain);
        copy_window(*product.image, product.x, part.first_row + m, group, copied);
        row = copied;
      }
      for (int64_t first = 0; first < k; first += kChain) {
        const int64_t length = k - first < kChain ? k - first : kChain;
        T::copy(row + first, length, to + first / kChain * chain + m * kStride);
      }
    }
    return true;
  }
};

// Prefetches the memory of y that the results will be written to.
inline void expect(float* y, int64_t rows, int64_t n, int64_t width) {
  for (int64_t m = 0; m < rows; ++m) {
    __builtin_prefetch(y + m * n, 1);
    __builtin_prefetch(y + m * n + width - 1, 1);
  }
}

// Computes all chains of the columns from `first_column` to `end` of one panel, or of two panels if all rows fit into one tile.
template <Arithmetic kArithmetic>
void compute_columns(const Product& product, const Part& part, const Rows<kArithmetic>& x, int64_t first_column,
                     int64_t end, Finish finish) {
  using T = Tiles<kArithmetic>;
  alignas(64) float totals[kTallBlock * kPanel];
  alignas(64) uint16_t scratch[kChain * kPanel];
  alignas(64) float wide[kChain * kPanel];
  const Weight& weight = product.weight;
  const int tiles = static_cast<int>((part.rows + T::kRows - 1) / T::kRows);
  constexpr int kBlockBytes = kChain * kPanel * sizeof(uint16_t);
  // Each tile prefetches its share of the next block, so that memory is read while the tiles compute.
  const int share = kBlockBytes / tiles;
  // A tile begins at the panel, or in its middle where tiles of half a panel exist.
  constexpr int64_t kUnit = T::kHalves ? Simd::kLanes : kPanel;
  const int64_t panel = first_column / kPanel, column = first_column / kUnit * kUnit, width = end - column;
  const bool widens = tiles > 1 && width > Simd::kLanes && T::widens();
  float* y = product.y + part.first_row * weight.n + column;
  for (int64_t first = 0; first < weight.k; first += kChain) {
    const int length = static_cast<int>(weight.k - first < kChain ? weight.k - first : kChain);
    const uint16_t* const w = block(weight, panel, first, length, scratch);
    Block now = {w + column % kPanel, kPanel, weight.k * kPanel, length, first == 0};
    if (widens) now.wide = wide;
    // A block that was copied to scratch has already prefetched what follows it. Its tiles prefetch the block itself, which
    // costs nothing.
    const bool stored = w != scratch;
    const char* next = reinterpret_cast<const char*>(stored ? w + length * kPanel : w);
    const auto* a = x.start + first / kChain * x.chain;
    for (int t = 0; t < tiles; ++t) {
      const int64_t begin = part.rows * t / tiles, stop = part.rows * (t + 1) / tiles;
      if (first == 0) expect(y + begin * weight.n, stop - begin, weight.n, std::min(width, kPanel));
      const Ahead ahead = {next + (stored ? t * share : 0), stored ? share / static_cast<int>(kChain) : 0};
      T::add(static_cast<int>(stop - begin), width, a + begin * x.stride, x.stride, now, totals + begin * kPanel, ahead);
      now.widened = widens;
      // Out-of-order execution may overlap this with the next tile's sums.
      if (first + kChain < weight.k) continue;
      for (int64_t at = 0; at < width; at += kPanel) {
        finish(product, totals + (at / kPanel * part.rows + begin) * kPanel, stop - begin, column + at, first_column - column,
               std::min(width - at, kPanel), y + begin * weight.n + at);
      }
    }
  }
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode that compute() sets.
template <Arithmetic kArithmetic>
__attribute__((noinline)) bool compute_part(const Product& product, const Part& part) {
  static thread_local PackedRows packed;
  Rows<kArithmetic> x;
  const Weight& weight = product.weight;
  const Finish finish_rows = with_constant(
      product.activation, [](auto activation) -> Finish { return finish<Tiles<kArithmetic>, activation.value>; });
  const int64_t end = part.first_panel + part.panels, groups = product.image == nullptr ? 1 : product.image->groups;
  const bool few = groups == 1 && part.rows <= Tiles<kArithmetic>::kTwoPanelRows && weight.layout == Layout::kPanels;
  for (int64_t panel = part.first_panel; panel < end;) {
    const int panels = few && panel + 1 < end && weight.width(panel + 1) == kPanel ? 2 : 1;
    const int64_t stop = (panel + panels - 1) * kPanel + weight.width(panel + panels - 1);
    for (int64_t column = panel * kPanel; column < stop;) {
      const int64_t group = column * groups / weight.n, last = std::min(stop, (group + 1) * weight.n / groups);
      if (!x.gather(product, part, group, packed)) return false;
      compute_columns<kArithmetic>(product, part, x, column, last, finish_rows);
      column = last;
    }
    panel += panels;
  }
  return true;
}

template <Arithmetic kArithmetic>
bool compute(const Product& product, const Part& part) {
  const RoundingMode mode(kArithmetic);
  return compute_part<kArithmetic>(product, part);
}
