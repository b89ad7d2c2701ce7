// Attention, for any instruction set. Each isa/*.cpp includes this file in its own namespace, after tile.inl, part.inl and
// heads.inl, or their replacements.
//
// The order of every sum is part of the interface, as in tile.inl. For one row of q and one head:
//     s[j] = sum over the columns d of q[d] * k[j][d]
//     x[j] = fma(s[j], scale, mask[j]), with mask = 0 if there is none
//     p[j] = 2^-16 e^(x[j] - max of x), so that no sum below overflows (softmax.inl)
//     y[c] = fma(sum over the keys j of p[j] * v[j][c], 1 / sum of p, 0)
// The sums of s and y consist of chains of 128 fused multiply-adds. Each chain starts at zero; the chains are added to a total
// one after the other. The sum of p consists of 32 sums, each of every 32nd element, which are added up as a tree. If a row is
// the only one that reads the keys of its head (one query, and no heads that share keys), its s consists of 16 sums instead,
// each of every 16th column, from zero, which are added up as a tree (one.inl). So the bits depend on the shape of one batch
// row, but not on other rows of the batch, other queries if there are any, the number of threads, or the path. Keys after the
// others whose p is zero, such as masked ones, change no bit if v is finite. Whole panels of such keys, before or after all keys
// that a tile of rows sees, are not computed (seen.inl); this changes no bit either.
//
// A row is NaN if every x is -inf, or if any x is NaN or +inf, as ONNX's Softmax defines.
//
// In bf16, q, k, p and v are rounded first. A chain adds its terms in pairs, the odd one first, as in tile.inl: pairs of columns
// of q and k, pairs of keys of p and v. Where s consists of 16 sums, each is of every 16th pair. Subnormals are zero. A sum may
// therefore be -0, but 0 with one more chain of zeros; adding 0 to y makes both 0. The sum of p is that of the rounded p, so that
// the weights add up to 1. It consists of 16 sums, each of every 16th pair, the odd one first, which are added up as a tree.
// Everything else is fp32.

#include "wide.inl"

#include "one.inl"

constexpr int64_t kAhead = 2 * kPanel;  // keys that are used once are prefetched this number of keys ahead

inline int64_t whole_lines(int64_t elements) { return (elements + 15) / 16 * 16; }

// A thread's memory for a part. It grows as needed, shrinks if it is large and a part needs less than a quarter (kLargeScratch),
// and is freed when the thread ends. It keeps the keys and values of one head for the thread's next parts.
struct HeadMemory {
  float* data = nullptr;
  int64_t size = 0;  // floats
  uint64_t attention = 0;  // the attention whose head it holds, and which head
  int64_t head = 0;
  float largest_key = -1;  // the largest magnitude of its keys, once computed; infinity if its values are not finite

  HeadMemory() = default;
  HeadMemory(const HeadMemory&) = delete;
  ~HeadMemory() { std::free(data); }

  float* get(int64_t wanted) {
    if (scratch_misfits(size * sizeof(float), wanted * sizeof(float))) {
      std::free(data);
      size = 0;
      attention = 0;
      data = static_cast<float*>(std::aligned_alloc(64, wanted * sizeof(float)));
      if (data != nullptr) size = wanted;
    }
    return data;
  }
};

// Returns whether the rows that read the same keys are one tile, so that each key and value is used once.
inline bool used_once(const Attention& a) { return a.rows() <= Simd::kRows; }

// Returns whether v is read in place, without a copy.
template <typename H>
bool values_in_place(const Attention& a) {
  return a.rows() == 1 ? H::kOneInPlace && a.width % Simd::kLanes == 0
                       : H::kValuesInPlace && used_once(a) && a.width % kPanel == 0;
}

// Returns how many columns of y are computed together: all, so that whole rows of v are read, or those of a panel.
template <typename H>
int64_t width_at_once(const Attention& a) {
  return values_in_place<H>(a) ? a.width : kPanel;
}

// The arrays in a part's memory. Elements are as large as floats.
template <typename H>
struct Workspace {
  Element<H>* keys;     // [panels, elements of depth, 32]; one panel if each key is used once
  Element<H>* values;   // [columns / 32, elements of keys, 32]
  Element<H>* queries;  // [kRows, elements of depth]
  float* scores;        // [kRows, stride]; overwritten by p, as elements
  float* totals;        // [kRows, columns of y that are computed together]
  int64_t stride;       // no power of two, which would put all rows into one cache set

  bool get(const Attention& a, HeadMemory& memory) {
    static_assert(sizeof(Element<H>) == sizeof(float));
    const int64_t panels = (a.keys + kPanel - 1) / kPanel, columns = (a.width + kPanel - 1) / kPanel;
    stride = panels * kPanel + 16;
    const int64_t sizes[] = {(used_once(a) ? 1 : panels) * elements<H>(a.depth) * kPanel,
                             values_in_place<H>(a) ? 0 : columns * elements<H>(a.keys) * kPanel,
                             Simd::kRows * elements<H>(a.depth) + H::kStep, Simd::kRows * stride, Simd::kRows * width_at_once<H>(a)};
    int64_t all = 0;
    for (int64_t size : sizes) all += whole_lines(size);
    float* const data = memory.get(all);
    if (data == nullptr) return false;
    keys = reinterpret_cast<Element<H>*>(data);
    values = keys + whole_lines(sizes[0]);
    queries = values + whole_lines(sizes[1]);
    scores = data + whole_lines(sizes[0]) + whole_lines(sizes[1]) + whole_lines(sizes[2]);
    totals = scores + whole_lines(sizes[3]);
    return true;
  }

  const Element<H>* weights() const { return reinterpret_cast<const Element<H>*>(scores); }
};

// Returns the address of a row.
inline const float* row_of(const Strided& from, int64_t batch, int64_t head, int64_t row) {
  return from.data + batch * from.batch + head * from.head + row * from.row;
}

// The head and the query of row `index` among the rows that read the same keys.
struct Row {
  int64_t head, query;
  Row(const Attention& a, const AttentionPart& part, int64_t index)
      : head(part.kv_head * a.shared() + index / a.queries), query(index % a.queries) {}
};

#include "seen.inl"

template <typename H>
void pack_keys(const Attention& a, int64_t batch, int64_t head, int64_t key, Element<H>* to) {
  const int64_t count = a.keys - key < kPanel ? a.keys - key : kPanel;
  H::pack_keys(row_of(a.k, batch, head, key), a.k.row, count, a.depth, to);
}

// Copies the keys and values of a head, except those that are used once: these are copied, if at all, just before.
template <typename H>
void pack_head(const Attention& a, int64_t batch, int64_t head, const Workspace<H>& space) {
  for (int64_t key = 0; key < a.keys && !used_once(a); key += kPanel) {
    pack_keys<H>(a, batch, head, key, space.keys + key * elements<H>(a.depth));
  }
  if (values_in_place<H>(a)) return;
  const float* values = row_of(a.v, batch, head, 0);
  for (int64_t column = 0; column < a.width; column += kPanel) {
    const int64_t columns = a.width - column < kPanel ? a.width - column : kPanel;
    H::pack_values(values + column, a.v.row, a.keys, columns, space.values + column * elements<H>(a.keys));
  }
}

// Prefetches a row of `columns` floats. The rows of one head are too far apart for the processor's own prefetcher.
// Always inlined: GCC treats a function that only prefetches as one without effect.
__attribute__((always_inline)) inline void ask_for(const float* row, int64_t columns) {
  for (int64_t i = 0; i < columns; i += 16) __builtin_prefetch(row + i);
  __builtin_prefetch(row + columns - 1);
}

// Returns the address of row `row` of y, for the row's head.
inline float* result_of(const Attention& a, const AttentionPart& part, const Row& row) {
  return a.y + ((part.batch * a.queries + row.query) * a.heads + row.head) * a.width;
}

// Prefetches the results of the tile [first, first + rows), and the queries of the next tile.
__attribute__((always_inline)) inline void ask_for_rows(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows) {
  const int64_t end = part.first_row + part.rows;
  for (int64_t m = first; m < first + rows; ++m) {
    ask_for(result_of(a, part, Row(a, part, m)), a.width);
    if (m + rows >= end) continue;
    const Row next(a, part, m + rows);
    ask_for(row_of(a.q, part.batch, next.head, next.query), a.depth);
  }
}

// Returns the keys that rows [first, first + rows) see. With few rows, each key is used too seldom for the search to pay off.
inline Seen seen_keys(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, HeadMemory& memory) {
  const Seen all = {0, a.keys};
  if (a.mask.data == nullptr || a.mask.column == 0 || a.keys <= kPanel || a.rows() <= Simd::kRows) return all;
  const Seen seen = seen_by(a, part, first, rows, 0);
  if (seen.begin == 0 && seen.end == a.keys) return all;
  if (memory.largest_key < 0) {
    memory.largest_key = largest(row_of(a.k, part.batch, part.kv_head, 0), a.k.row, a.keys, a.depth);
    const float value = largest(row_of(a.v, part.batch, part.kv_head, 0), a.v.row, a.keys, a.width);
    if (value == kInfinity) memory.largest_key = kInfinity;
  }
  float query = 0;
  for (int64_t m = first; m < first + rows; ++m) {
    const Row row(a, part, m);
    const float found = largest(row_of(a.q, part.batch, row.head, row.query), 0, 1, a.depth);
    if (found > query) query = found;
  }
  return seen_by(a, part, first, rows, query * memory.largest_key * static_cast<float>(a.depth) * std::fabs(a.scale));
}

// Computes the scores of the keys that rows [first, first + rows) see, then replaces them by p; the first p is where its score
// was. sums[m] becomes the sum of row m's p.
template <typename H>
void soften_rows(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, Seen seen,
                 const Workspace<H>& space, float* sums) {
  static constexpr float kNone = 0;
  const int64_t depth = elements<H>(a.depth);
  for (int64_t m = 0; m < rows; ++m) {
    const Row row(a, part, first + m);
    H::copy_row(row_of(a.q, part.batch, row.head, row.query), a.depth, space.queries + m * depth);
  }
  ask_for_rows(a, part, first, rows);
  if (a.rows() == 1) {
    std::memset(space.queries + depth, 0, sizeof(Element<H>) * H::kStep);
    scores_of_one<H>(space.queries, row_of(a.k, part.batch, part.kv_head, 0), a.k.row, a.keys, a.depth, space.scores);
  }
  for (int64_t key = seen.begin; key < seen.end && a.rows() > 1; key += kPanel) {
    Element<H>* keys = space.keys;
    if (!used_once(a)) {
      keys += key * depth;
    } else {
      for (int64_t next = key + kAhead; next < key + kAhead + kPanel && next < a.keys; ++next) {
        ask_for(row_of(a.k, part.batch, part.kv_head, next), a.depth);
      }
      pack_keys<H>(a, part.batch, part.kv_head, key, keys);
    }
    multiply_wide<H>(rows, space.queries, depth, keys, kPanel, a.depth, space.scores + key, space.stride);
  }
  const bool masked = a.mask.data != nullptr;
  const int64_t step = masked ? a.mask.column : 0, keys = seen.end - seen.begin;
  float highest[Simd::kRows];
  for (int64_t m = 0; m < rows; ++m) {
    const Row row(a, part, first + m);
    const float* mask = masked ? row_of(a.mask, part.batch, row.head, row.query) + seen.begin * step : &kNone;
    highest[m] = add_masks(space.scores + m * space.stride + seen.begin, keys, a.scale, mask, step);
  }
  // In a second loop, so that no row has to wait for its own maximum.
  for (int64_t m = 0; m < rows; ++m) {
    sums[m] = H::soften(space.scores + m * space.stride + seen.begin, keys, highest[m]);
  }
}

// Computes y of rows [first, first + rows) from their p and sums.
template <typename H>
void add_values(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, Seen seen,
                const Workspace<H>& space, const float* sums) {
  const bool in_place = values_in_place<H>(a);
  const int64_t together = width_at_once<H>(a);
  for (int64_t column = 0; column < a.width; column += together) {
    const int64_t columns = a.width - column < together ? a.width - column : together;
    const Element<H>* values = space.values + column * elements<H>(a.keys);
    int64_t stride = kPanel;
    if constexpr (H::kValuesInPlace) {
      if (in_place) values = row_of(a.v, part.batch, part.kv_head, 0), stride = a.v.row;
    }
    if (in_place && a.rows() == 1) {
      values_of_one<H>(space.weights(), row_of(a.v, part.batch, part.kv_head, 0), a.v.row, a.keys, a.width, space.totals);
    } else {
      multiply_wide<H>(rows, space.weights() + seen.begin, space.stride, values + seen.begin / H::kValues * stride, stride,
                       seen.end - seen.begin, space.totals, together, together, seen.begin);
    }
    for (int64_t m = 0; m < rows; ++m) {
      const Row row(a, part, first + m);
      float* totals = space.totals + m * together;
      const Simd::reg factor = Simd::set(1.0f / sums[m]);
      for (int64_t v = 0; v < together; v += Simd::kLanes) {
        Simd::store(totals + v, Simd::fma(Simd::load(totals + v), factor, Simd::zero()));
      }
      copy(totals, columns, result_of(a, part, row) + column);
    }
  }
}

// Not inlined, so that the compiler cannot move arithmetic out of the rounding mode that attend() sets.
template <typename H>
__attribute__((noinline)) bool attend_part(const Attention& a, const AttentionPart& part) {
  static thread_local HeadMemory memory;
  Workspace<H> space;
  if (!space.get(a, memory)) return false;
  const int64_t head = part.batch * a.kv_heads + part.kv_head;
  if (memory.attention != a.id || memory.head != head) {
    pack_head(a, part.batch, part.kv_head, space);
    memory.attention = a.id;
    memory.head = head;
    memory.largest_key = -1;
  }
  float sums[Simd::kRows];
  const int64_t tiles = (part.rows + Simd::kRows - 1) / Simd::kRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = part.rows * t / tiles, rows = part.rows * (t + 1) / tiles - begin;
    const Seen seen = seen_keys(a, part, part.first_row + begin, rows, memory);
    soften_rows(a, part, part.first_row + begin, rows, seen, space, sums);
    add_values(a, part, part.first_row + begin, rows, seen, space, sums);
  }
  return true;
}

template <Arithmetic kArithmetic>
bool attend(const Attention& a, const AttentionPart& part) {
  const RoundingMode mode(kArithmetic);
  return attend_part<Heads<kArithmetic>>(a, part);
}
