// Blocks of a weight in the format of the tiles: [length, 32] bf16. Included by part.inl, so compiled for each path.

typedef uint32_t Pairs __attribute__((vector_size(32)));  // eight elements of two bf16
// Pairs in memory, for loads and stores. Not memcpy: GCC splits it into two moves, and a load that spans two stores stalls.
typedef Pairs StoredPairs __attribute__((aligned(2), may_alias));

inline Pairs load_pairs(const uint16_t* from) { return *reinterpret_cast<const StoredPairs*>(from); }
inline void store_pairs(uint16_t* to, Pairs pairs) { *reinterpret_cast<StoredPairs*>(to) = pairs; }

// Shuffles the elements of a (0 to 7) and b (8 to 15) into the given order. GCC has __builtin_shufflevector only since 12.
#if defined(__clang__)
#define BF16KIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define BF16KIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Pairs{__VA_ARGS__})
#endif

// Transposes 8 x 8 elements of 32 bits in three rounds. Each round joins rows that are twice as far apart as in the one before.
inline void transpose_pairs(Pairs (&rows)[8]) {
  Pairs once[8], twice[8];
  for (int i = 0; i < 8; i += 2) {
    once[i] = BF16KIT_SHUFFLE(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    once[i + 1] = BF16KIT_SHUFFLE(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      twice[i + 2 * j] = BF16KIT_SHUFFLE(once[i + j], once[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      twice[i + 2 * j + 1] = BF16KIT_SHUFFLE(once[i + j], once[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    rows[i] = BF16KIT_SHUFFLE(twice[i], twice[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = BF16KIT_SHUFFLE(twice[i], twice[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#undef BF16KIT_SHUFFLE

// Transposes 16 columns of 16 rows: from[c * stride + r] becomes to[r * 32 + c]. An element holds a pair of rows. Even and odd
// columns are transposed separately; at the end they become the halves of an element.
inline void transpose_tile(const uint16_t* from, int64_t stride, uint16_t* to) {
  Pairs even[8], odd[8];
  for (int i = 0; i < 8; ++i) {
    even[i] = load_pairs(from + 2 * i * stride);
    odd[i] = load_pairs(from + (2 * i + 1) * stride);
  }
  transpose_pairs(even);
  transpose_pairs(odd);
  for (int i = 0; i < 8; ++i) {
    store_pairs(to + 2 * i * kPanel, (even[i] & 0xffff) | (odd[i] << 16));
    store_pairs(to + (2 * i + 1) * kPanel, (even[i] >> 16) | (odd[i] & 0xffff0000));
  }
}

// Copies `width` rows of [n, k], `stride` apart, to the columns of [length, 32], padded with zeros on the right.
inline void transpose(const uint16_t* from, int64_t stride, int64_t length, int64_t width, uint16_t* to) {
  constexpr int64_t kLine = 32;  // elements of a cache line
  // The prefetch distance. A panel's columns are contiguous, so the same place in the next panel is read one panel later. If
  // that is too far ahead for the second-level cache, prefetch the next chain.
  const int64_t ahead = stride <= 4096 ? kPanel * stride : kChain;
  if (width < kPanel) std::memset(to, 0, sizeof(uint16_t) * length * kPanel);
  const int64_t whole_columns = width / 16 * 16, whole_rows = length / kLine * kLine;
  for (int64_t column = 0; column < whole_columns; column += 16) {
    for (int64_t row = 0; row < whole_rows; row += kLine) {
      // Reads each cache line once, as a whole: if the stride is a power of two, the lines of more than eight columns do not fit
      // into the first-level cache together. Prefetches the next lines at the same time.
      alignas(64) uint16_t lines[16 * kLine];
      for (int c = 0; c < 16; ++c) {
        const uint16_t* line = from + (column + c) * stride + row;
        __builtin_prefetch(line + ahead, 0, 2);
        store_pairs(lines + c * kLine, load_pairs(line));
        store_pairs(lines + c * kLine + 16, load_pairs(line + 16));
      }
      transpose_tile(lines, kLine, to + row * kPanel + column);
      transpose_tile(lines + 16, kLine, to + (row + 16) * kPanel + column);
    }
  }
  for (int64_t column = 0; column < width; ++column) {
    const int64_t done = column < whole_columns ? whole_rows : 0;
    for (int64_t row = done; row < length; ++row) to[row * kPanel + column] = from[column * stride + row];
  }
}

// Copies up to 31 elements. So few take longer in a call of the library's memcpy.
template <typename Element>
__attribute__((always_inline)) inline void copy_few(const Element* from, int64_t count, Element* to) {
#pragma GCC unroll 5
  for (int64_t some = 16; some > 0; some /= 2) {
    if ((count & some) == 0) continue;
    std::memcpy(to, from, sizeof(Element) * some);
    from += some;
    to += some;
  }
}

// Copies [length, width] to [length, 32], padded with zeros on the right.
inline void widen(const uint16_t* from, int64_t length, int64_t width, uint16_t* to) {
  for (int64_t row = 0; row < length; ++row) {
    std::memset(to + row * kPanel, 0, sizeof(uint16_t) * kPanel);
    copy_few(from + row * width, width, to + row * kPanel);
  }
}

// Returns rows [first, first + length) of `panel` as [length, 32], with missing columns as zeros. A full panel is returned in
// place. Otherwise the rows are copied to `scratch`, kChain * kPanel elements.
inline const uint16_t* block(const Weight& weight, int64_t panel, int64_t first, int64_t length, uint16_t* scratch) {
  const int64_t width = weight.width(panel);
  const uint16_t* start = weight.data + panel * kPanel * weight.k;
  if (weight.layout == Layout::kTransposed) {
    transpose(start + first, weight.k, length, width, scratch);
    return scratch;
  }
  if (width == kPanel) return start + first * kPanel;
  widen(start + first * width, length, width, scratch);
  return scratch;
}
