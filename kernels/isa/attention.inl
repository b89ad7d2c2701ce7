// Attention, for any instruction set. Included by each isa/*.cpp inside its own namespace, after tile.inl and part.inl.
//
// The order of every sum is part of the interface, as in tile.inl. For one row of q and one head:
//     s[j] = sum over the columns d of q[d] * k[j][d]
//     x[j] = fma(s[j], scale, mask[j]), the mask being 0 where there is none
//     p[j] = e^(x[j] - max of x)
//     y[c] = (sum over the keys j of p[j] * v[j][c]) * (1 / sum of p)
// where the first and the last sum are made of chains of 128 fused multiply-adds, each from zero, added to a total one
// after the other, and the sum of p of 32 sums, of every 32nd element each, added up as a tree. So the bits do not
// depend on the rows around, the number of threads, or the path. Keys whose p is zero, as those are that a mask hides,
// change nothing behind the others: the same bits with and without them, where v is finite.
//
// Rows in which every x is -inf, or any NaN or +inf, are NaN, as ONNX's Softmax defines.

#include "softmax.inl"

constexpr int kSpan = 2 * Simd::kLanes;  // columns of a tile

// c[kRows, 2 vectors] = (first ? 0 : c) + a[kRows, length] · b[length, 2 vectors]; rows lie lda, ldb and ldc apart.
template <int kRows>
void wide_chain(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t length, float* c, int64_t ldc,
                bool first) {
  typename Simd::reg sums[kRows][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) sums[m][0] = sums[m][1] = Simd::zero();
  const float* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
#pragma GCC unroll 2
  for (int64_t k = 0; k < length; ++k) {
    const typename Simd::reg left = Simd::load(b + k * ldb), right = Simd::load(b + k * ldb + Simd::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const typename Simd::reg x = Simd::broadcast(from[m / 3] + m % 3 * lda + k);
      sums[m][0] = Simd::fma(x, left, sums[m][0]);
      sums[m][1] = Simd::fma(x, right, sums[m][1]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      float* to = c + m * ldc + h * Simd::kLanes;
      Simd::store(to, Simd::add(first ? Simd::zero() : Simd::load(to), sums[m][h]));
    }
  }
}

using WideChain = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t, bool);

template <int... kRows>
WideChain wide_chain_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr WideChain kTable[] = {wide_chain<kRows + 1>...};
  return kTable[rows - 1];
}

// c[rows, 32] = a[rows, length] · b[length, 32]
inline void multiply_wide(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t length,
                          float* c, int64_t ldc) {
  const WideChain chain = wide_chain_of(rows, std::make_integer_sequence<int, Simd::kRows>());
  for (int64_t first = 0; first < length; first += kChain) {
    const int64_t some = length - first < kChain ? length - first : kChain;
    for (int column = 0; column < kPanel; column += kSpan) {
      chain(a + first, lda, b + first * ldb + column, ldb, some, c + column, ldc, first == 0);
    }
  }
}

// Copies `count` rows of k, at most 32, to the columns of [depth, 32], with zeros to the right.
inline void transpose_keys(const float* from, int64_t stride, int64_t count, int64_t depth, float* to) {
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
}

// Copies 32 columns of v, or as many as are left, to [keys, 32], with zeros to the right.
inline void copy_values(const float* from, int64_t stride, int64_t keys, int64_t columns, float* to) {
  if (columns < kPanel) std::memset(to, 0, sizeof(float) * keys * kPanel);
  for (int64_t key = 0; key < keys; ++key, from += stride, to += kPanel) copy(from, columns, to);
}

inline int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Where a thread keeps a part's memory; grows, and is freed when the thread ends. It holds the keys and values of one
// head for the parts that follow.
struct HeadMemory {
  float* data = nullptr;
  int64_t size = 0;  // floats
  uint64_t attention = 0;  // whose head is in it, and which
  int64_t head = 0;

  HeadMemory() = default;
  HeadMemory(const HeadMemory&) = delete;
  ~HeadMemory() { std::free(data); }

  float* get(int64_t wanted) {
    if (wanted > size) {
      std::free(data);
      size = 0;
      attention = 0;
      data = static_cast<float*>(std::aligned_alloc(64, wanted * sizeof(float)));
      if (data != nullptr) size = wanted;
    }
    return data;
  }
};

// The memory of a part, and what lies where in it.
struct Workspace {
  float* keys;     // [panels, depth, 32]
  float* values;   // [columns / 32, keys, 32]
  float* queries;  // [kRows, depth]
  float* scores;   // [kRows, stride]
  float* totals;   // [kRows, 32]
  int64_t stride;  // no power of two, which would put all rows in one cache set

  bool get(const Attention& a, HeadMemory& memory) {
    const int64_t panels = (a.keys + kPanel - 1) / kPanel, columns = (a.width + kPanel - 1) / kPanel;
    stride = panels * kPanel + 16;
    const int64_t sizes[] = {panels * a.depth * kPanel, columns * a.keys * kPanel, Simd::kRows * a.depth,
                             Simd::kRows * stride, Simd::kRows * kPanel};
    int64_t all = 0;
    for (int64_t size : sizes) all += whole_lines(size);
    keys = memory.get(all);
    values = keys + whole_lines(sizes[0]);
    queries = values + whole_lines(sizes[1]);
    scores = queries + whole_lines(sizes[2]);
    totals = scores + whole_lines(sizes[3]);
    return keys != nullptr;
  }
};

// Where some matrix's row lies.
inline const float* row_of(const Strided& from, int64_t batch, int64_t head, int64_t row) {
  return from.data + batch * from.batch + head * from.head + row * from.row;
}

// A few rows see each value once, and read it where it is.
inline bool values_in_place(const Attention& a) { return a.rows() <= Simd::kRows && a.width % kPanel == 0; }

void pack_head(const Attention& a, int64_t batch, int64_t head, const Workspace& space) {
  for (int64_t key = 0; key < a.keys; key += kPanel) {
    const int64_t count = a.keys - key < kPanel ? a.keys - key : kPanel;
    transpose_keys(row_of(a.k, batch, head, key), a.k.row, count, a.depth, space.keys + key * a.depth);
  }
  if (values_in_place(a)) return;
  const float* values = row_of(a.v, batch, head, 0);
  for (int64_t column = 0; column < a.width; column += kPanel) {
    const int64_t columns = a.width - column < kPanel ? a.width - column : kPanel;
    copy_values(values + column, a.v.row, a.keys, columns, space.values + column * a.keys);
  }
}

// Of row `index` of those that read the same keys: the head and the query.
struct Row {
  int64_t head, query;
  Row(const Attention& a, const AttentionPart& part, int64_t index)
      : head(part.kv_head * a.shared() + index / a.queries), query(index % a.queries) {}
};

// Scores of rows [first, first + rows), then their p; sums[m] is what each row's p add up to.
void soften_rows(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, const Workspace& space,
                 float* sums) {
  static constexpr float kNone = 0;
  for (int64_t m = 0; m < rows; ++m) {
    const Row row(a, part, first + m);
    copy(row_of(a.q, part.batch, row.head, row.query), a.depth, space.queries + m * a.depth);
  }
  for (int64_t key = 0; key < a.keys; key += kPanel) {
    multiply_wide(rows, space.queries, a.depth, space.keys + key * a.depth, kPanel, a.depth, space.scores + key,
                  space.stride);
  }
  const bool masked = a.mask.data != nullptr;
  float highest[Simd::kRows];
  for (int64_t m = 0; m < rows; ++m) {
    const Row row(a, part, first + m);
    const float* mask = masked ? row_of(a.mask, part.batch, row.head, row.query) : &kNone;
    highest[m] = add_masks(space.scores + m * space.stride, a.keys, a.scale, mask, masked ? a.mask.column : 0);
  }
  // After all of them: the processor then need not wait for the one that it has just looked for.
  for (int64_t m = 0; m < rows; ++m) sums[m] = soften(space.scores + m * space.stride, a.keys, highest[m]);
}

// y of rows [first, first + rows), whose p and sums are there.
void add_values(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, const Workspace& space,
                const float* sums) {
  const bool in_place = values_in_place(a);
  const float* stored = row_of(a.v, part.batch, part.kv_head, 0);
  for (int64_t column = 0; column < a.width; column += kPanel) {
    const int64_t columns = a.width - column < kPanel ? a.width - column : kPanel;
    const float* values = in_place ? stored + column : space.values + column * a.keys;
    multiply_wide(rows, space.scores, space.stride, values, in_place ? a.v.row : kPanel, a.keys, space.totals, kPanel);
    for (int64_t m = 0; m < rows; ++m) {
      const Row row(a, part, first + m);
      float* totals = space.totals + m * kPanel;
      const Simd::reg factor = Simd::set(1.0f / sums[m]);
      for (int v = 0; v < kPanel; v += Simd::kLanes) {
        Simd::store(totals + v, Simd::mul(Simd::load(totals + v), factor));
      }
      float* y = a.y + ((part.batch * a.queries + row.query) * a.heads + row.head) * a.width + column;
      copy(totals, columns, y);
    }
  }
}

// Not inlined: nothing of it may move out of the rounding mode that attend() sets.
__attribute__((noinline)) bool attend_part(const Attention& a, const AttentionPart& part) {
  static thread_local HeadMemory memory;
  Workspace space;
  if (!space.get(a, memory)) return false;
  const int64_t head = part.batch * a.kv_heads + part.kv_head;
  if (memory.attention != a.id || memory.head != head) {
    pack_head(a, part.batch, part.kv_head, space);
    memory.attention = a.id;
    memory.head = head;
  }
  float sums[Simd::kRows];
  const int64_t tiles = (part.rows + Simd::kRows - 1) / Simd::kRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = part.rows * t / tiles, rows = part.rows * (t + 1) / tiles - begin;
    soften_rows(a, part, part.first_row + begin, rows, space, sums);
    add_values(a, part, part.first_row + begin, rows, space, sums);
  }
  return true;
}

bool attend(const Attention& a, const AttentionPart& part) {
  const RoundingMode mode(Arithmetic::kFp32);
  return attend_part(a, part);
}
