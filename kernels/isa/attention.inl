// Attention, for any instruction set. Included by each isa/*.cpp inside its own namespace, after tile.inl, part.inl and
// heads.inl, or what replaces them.
//
// The order of every sum is part of the interface, as in tile.inl. For one row of q and one head:
//     s[j] = sum over the columns d of q[d] * k[j][d]
//     x[j] = fma(s[j], scale, mask[j]), the mask being 0 where there is none
//     p[j] = e^(x[j] - max of x)
//     y[c] = fma(sum over the keys j of p[j] * v[j][c], 1 / sum of p, 0)
// where the first and the last sum are made of chains of 128 fused multiply-adds, each from zero, added to a total one
// after the other, and the sum of p of 32 sums, of every 32nd element each, added up as a tree. So the bits do not
// depend on the rows around, the number of threads, or the path. Keys whose p is zero, as those are that a mask hides,
// change nothing behind the others: the same bits with and without them, where v is finite.
//
// Rows in which every x is -inf, or any NaN or +inf, are NaN, as ONNX's Softmax defines.
//
// In bf16, q, k, p and v are rounded first, and a chain takes its terms in pairs, the odd one first, as in tile.inl: pairs
// of columns of q and k, pairs of keys of p and v. Subnormals are zero: a sum may be -0, which would be 0 with one more
// chain of zeros, and adding 0 to y makes them the same. The sum of p is that of the rounded ones, so that
// weights add up to 1: of 16 sums, of every 16th pair each, the odd one first, added up as a tree. Everything else is fp32.

template <typename H>
using Element = typename H::Element;

constexpr int kSpan = 2 * Simd::kLanes;  // columns of a tile

// c[kRows, 2 vectors] = (first ? 0 : c) + a[kRows, length] · b[length, 2 vectors]; rows lie lda, ldb and ldc apart, and
// length counts elements.
template <typename H, int kRows>
void wide_chain(const Element<H>* a, int64_t lda, const Element<H>* b, int64_t ldb, int64_t length, float* c,
                int64_t ldc, bool first) {
  typename Simd::reg sums[kRows][2];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) sums[m][0] = sums[m][1] = Simd::zero();
  const Element<H>* from[(kRows + 2) / 3];
  for (int i = 0; i < (kRows + 2) / 3; ++i) from[i] = a + 3 * i * lda;
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    const typename H::Vector left = H::load(b + k * ldb), right = H::load(b + k * ldb + Simd::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Element<H>* x = from[m / 3] + m % 3 * lda + k;
      sums[m][0] = H::dot(x, left, sums[m][0]);
      sums[m][1] = H::dot(x, right, sums[m][1]);
    }
  };
  if constexpr (H::kOddFirst) {
    for (int64_t k = 0; k + 1 < length; k += 2) {
      step(k + 1);
      step(k);
    }
    if (length % 2 != 0) step(length - 1);
  } else {
#pragma GCC unroll 2
    for (int64_t k = 0; k < length; ++k) step(k);
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

template <typename H>
using WideChain = void (*)(const Element<H>*, int64_t, const Element<H>*, int64_t, int64_t, float*, int64_t, bool);

template <typename H, int... kRows>
WideChain<H> wide_chain_of(int64_t rows, std::integer_sequence<int, kRows...>) {
  static constexpr WideChain<H> kTable[] = {wide_chain<H, kRows + 1>...};
  return kTable[rows - 1];
}

// How many elements hold so many values.
template <typename H>
int64_t elements(int64_t values) {
  return (values + H::kValues - 1) / H::kValues;
}

// c[rows, 32] = a[rows, length] · b[length, 32], of which a and b hold elements(length).
template <typename H>
void multiply_wide(int64_t rows, const Element<H>* a, int64_t lda, const Element<H>* b, int64_t ldb, int64_t length,
                   float* c, int64_t ldc) {
  const WideChain<H> chain = wide_chain_of<H>(rows, std::make_integer_sequence<int, Simd::kRows>());
  for (int64_t first = 0; first < length; first += kChain) {
    const int64_t some = elements<H>(length - first < kChain ? length - first : kChain), at = first / H::kValues;
    for (int column = 0; column < kPanel; column += kSpan) {
      chain(a + at, lda, b + at * ldb + column, ldb, some, c + column, ldc, first == 0);
    }
  }
}

inline int64_t whole_lines(int64_t elements) { return (elements + 15) / 16 * 16; }

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

// The memory of a part, and what lies where in it. Elements are as large as floats.
template <typename H>
struct Workspace {
  Element<H>* keys;     // [panels, elements of depth, 32]
  Element<H>* values;   // [columns / 32, elements of keys, 32]
  Element<H>* queries;  // [kRows, elements of depth]
  float* scores;        // [kRows, stride]; p takes their place, as elements
  float* totals;        // [kRows, 32]
  int64_t stride;       // no power of two, which would put all rows in one cache set

  bool get(const Attention& a, HeadMemory& memory) {
    static_assert(sizeof(Element<H>) == sizeof(float));
    const int64_t panels = (a.keys + kPanel - 1) / kPanel, columns = (a.width + kPanel - 1) / kPanel;
    stride = panels * kPanel + 16;
    const int64_t sizes[] = {panels * elements<H>(a.depth) * kPanel, columns * elements<H>(a.keys) * kPanel,
                             Simd::kRows * elements<H>(a.depth), Simd::kRows * stride, Simd::kRows * kPanel};
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

// Where some matrix's row lies.
inline const float* row_of(const Strided& from, int64_t batch, int64_t head, int64_t row) {
  return from.data + batch * from.batch + head * from.head + row * from.row;
}

// Whether values are read where they are.
template <typename H>
bool values_in_place(const Attention& a) {
  return H::kValuesInPlace && a.rows() <= Simd::kRows && a.width % kPanel == 0;
}

template <typename H>
void pack_head(const Attention& a, int64_t batch, int64_t head, const Workspace<H>& space) {
  for (int64_t key = 0; key < a.keys; key += kPanel) {
    const int64_t count = a.keys - key < kPanel ? a.keys - key : kPanel;
    H::pack_keys(row_of(a.k, batch, head, key), a.k.row, count, a.depth, space.keys + key * elements<H>(a.depth));
  }
  if (values_in_place<H>(a)) return;
  const float* values = row_of(a.v, batch, head, 0);
  for (int64_t column = 0; column < a.width; column += kPanel) {
    const int64_t columns = a.width - column < kPanel ? a.width - column : kPanel;
    H::pack_values(values + column, a.v.row, a.keys, columns, space.values + column * elements<H>(a.keys));
  }
}

// Of row `index` of those that read the same keys: the head and the query.
struct Row {
  int64_t head, query;
  Row(const Attention& a, const AttentionPart& part, int64_t index)
      : head(part.kv_head * a.shared() + index / a.queries), query(index % a.queries) {}
};

// Scores of rows [first, first + rows), then their p; sums[m] is what each row's p add up to.
template <typename H>
void soften_rows(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, const Workspace<H>& space,
                 float* sums) {
  static constexpr float kNone = 0;
  const int64_t depth = elements<H>(a.depth);
  for (int64_t m = 0; m < rows; ++m) {
    const Row row(a, part, first + m);
    H::copy_row(row_of(a.q, part.batch, row.head, row.query), a.depth, space.queries + m * depth);
  }
  for (int64_t key = 0; key < a.keys; key += kPanel) {
    multiply_wide<H>(rows, space.queries, depth, space.keys + key * depth, kPanel, a.depth, space.scores + key,
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
  for (int64_t m = 0; m < rows; ++m) sums[m] = H::soften(space.scores + m * space.stride, a.keys, highest[m]);
}

// y of rows [first, first + rows), whose p and sums are there.
template <typename H>
void add_values(const Attention& a, const AttentionPart& part, int64_t first, int64_t rows, const Workspace<H>& space,
                const float* sums) {
  const bool in_place = values_in_place<H>(a);
  for (int64_t column = 0; column < a.width; column += kPanel) {
    const int64_t columns = a.width - column < kPanel ? a.width - column : kPanel;
    const Element<H>* values = space.values + column * elements<H>(a.keys);
    if constexpr (H::kValuesInPlace) {
      if (in_place) values = row_of(a.v, part.batch, part.kv_head, 0) + column;
    }
    multiply_wide<H>(rows, space.weights(), space.stride, values, in_place ? a.v.row : kPanel, a.keys, space.totals,
                     kPanel);
    for (int64_t m = 0; m < rows; ++m) {
      const Row row(a, part, first + m);
      float* totals = space.totals + m * kPanel;
      const Simd::reg factor = Simd::set(1.0f / sums[m]);
      for (int v = 0; v < kPanel; v += Simd::kLanes) {
        Simd::store(totals + v, Simd::fma(Simd::load(totals + v), factor, Simd::zero()));
      }
      float* y = a.y + ((part.batch * a.queries + row.query) * a.heads + row.head) * a.width + column;
      copy(totals, columns, y);
    }
  }
}

// Not inlined: nothing of it may move out of the rounding mode that attend() sets.
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

template <Arithmetic kArithmetic>
bool attend(const Attention& a, const AttentionPart& part) {
  const RoundingMode mode(kArithmetic);
  return attend_part<Heads<kArithmetic>>(a, part);
}
