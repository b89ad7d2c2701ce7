// Compares attention with float64 in random cases, on every path that the processor supports.
//
//   attention_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>

#include "attention_case.h"
#include "checks.h"

namespace bf16kit {
namespace {

Exact<float> compute(const AttentionCase& c, const Path& path, int64_t threads) {
  Exact<float> y(c.outputs(), 1);
  Attention attention = c.attention(y.data());
  attend(attention, path, run_on_threads, &threads);
  return y;
}

// Computes y in a thread that treats subnormals as zero, as some libraries leave it.
Exact<float> compute_without_subnormals(const AttentionCase& c, const Path& path) {
  const uint64_t before = RoundingMode::current();
#if defined(__x86_64__)
  RoundingMode::set(before | 0x8040);
#else
  RoundingMode::set(before | 1 << 24);
#endif
  Exact<float> y = compute(c, path, 1);
  RoundingMode::set(before);
  return y;
}

// Divides the rows that read the same keys into random parts, and computes them in random order.
Exact<float> compute_in_parts(const AttentionCase& c, const Path& path, Random& random) {
  static uint64_t id = uint64_t{1} << 40;
  Exact<float> y(c.outputs(), 2);
  Attention attention = c.attention(y.data());
  attention.id = ++id;
  std::vector<AttentionPart> parts;
  for (int64_t head = 0; head < c.batch * c.kv_heads; ++head) {
    for (int64_t row = 0, rows; row < attention.rows(); row += rows) {
      rows = random.between(1, attention.rows() - row);
      parts.push_back({head / c.kv_heads, head % c.kv_heads, row, rows});
    }
  }
  for (size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[random.between(0, i - 1)]);
  const Attend compute = c.arithmetic == Arithmetic::kFp32 ? path.attend : path.attend_bf16;
  for (const AttentionPart& part : parts) compute(attention, part);
  return y;
}

void check_close(const AttentionCase& c, const Exact<float>& y, const std::string& where) {
  const Attention a = c.attention(nullptr);
  for (int64_t i = 0; i < c.outputs(); i += c.width) {
    const int64_t head = i / c.width % c.heads(), row = i / c.width / c.heads();
    const ExpectedRow expected = expect_row(c, a, row / c.queries, head, row % c.queries);
    for (int64_t column = 0; column < c.width; ++column) {
      const double wanted = expected.y[column], got = y[i + column];
      // Infinity times a p that rounds to zero, or nearly so: one of the two results may be NaN.
      if (std::isfinite(wanted) ? std::fabs(got - wanted) <= expected.tolerance[column] : !std::isfinite(got)) continue;
      return fail(where, number(got) + " is not " + number(wanted) + " at element " + std::to_string(i + column));
    }
  }
}

void check_same(const Exact<float>& whole, const Exact<float>& part, int64_t first, const std::string& where,
                const std::string& what) {
  for (int64_t i = 0; i < part.size(); ++i) {
    if (same(whole[first + i], part[i])) continue;
    const std::string otherwise = ", but " + number(whole[first + i]) + " otherwise, element " + std::to_string(i);
    return fail(where, number(part[i]) + " " + what + otherwise);
  }
}

// Computes one query of one batch row alone, in all heads; or two, if one query would be the only one to read a head's keys,
// which has another order of sums.
void check_alone(const AttentionCase& c, const Path& path, const Exact<float>& whole, Random& random,
                 const std::string& where) {
  const int64_t count = c.shared == 1 && c.queries > 1 ? 2 : 1, width = c.heads() * c.width;
  const int64_t batch = random.between(0, c.batch - 1), query = random.between(0, c.queries - count);
  Exact<float> y(count * width, 1);
  Attention a = c.attention(y.data());
  a.batch = 1, a.queries = count;
  a.q.data += batch * a.q.batch + query * a.q.row;
  a.k.data += batch * a.k.batch;
  a.v.data += batch * a.v.batch;
  if (c.masked) a.mask.data += batch * a.mask.batch + query * a.mask.row;
  int64_t threads = 1;
  attend(a, path, run_on_threads, &threads);
  check_same(whole, y, (batch * c.queries + query) * width, where, "alone");
}

// Returns the same attention with more keys after the others, hidden by the mask.
AttentionCase padded(const AttentionCase& c, Random& random) {
  AttentionCase longer;
  longer.batch = c.batch, longer.kv_heads = c.kv_heads, longer.shared = c.shared, longer.queries = c.queries;
  longer.keys = c.keys + random.between(1, 150), longer.depth = c.depth, longer.width = c.width;
  std::copy(std::begin(c.in_heads), std::end(c.in_heads), longer.in_heads);
  longer.arithmetic = c.arithmetic;
  longer.masked = true;
  std::fill(std::begin(longer.along), std::end(longer.along), true);
  const Attention a = c.attention(nullptr);
  const auto grown = [&](const Strided& from, bool in_heads, int64_t columns) {
    Exact<float> to(c.batch * c.kv_heads * longer.keys * columns, 0);
    const Strided there = AttentionCase::strided(to.data(), in_heads, c.kv_heads, longer.keys, columns);
    for (int64_t i = 0; i < c.batch * c.kv_heads * longer.keys; ++i) {
      const int64_t key = i % longer.keys, head = i / longer.keys % c.kv_heads, batch = i / longer.keys / c.kv_heads;
      float* at = const_cast<float*>(element(there, batch, head, key));
      for (int64_t d = 0; d < columns; ++d) at[d] = key < c.keys ? element(from, batch, head, key)[d] : random.normal();
    }
    return to;
  };
  longer.k = grown(a.k, c.in_heads[1], c.depth), longer.v = grown(a.v, c.in_heads[2], c.width);
  longer.mask = Exact<float>(c.batch * c.heads() * c.queries * longer.keys, 0);
  for (int64_t i = 0; i < longer.mask.size(); ++i) {
    const int64_t key = i % longer.keys, query = i / longer.keys % c.queries, head = i / longer.keys / c.queries;
    longer.mask[i] = key < c.keys ? 0 : -std::numeric_limits<float>::infinity();
    if (key >= c.keys || !c.masked) continue;
    longer.mask[i] = element(a.mask, head / c.heads(), head % c.heads(), query)[key * a.mask.column];
  }
  return longer;
}

void check_padded(const AttentionCase& c, const Path& path, const Exact<float>& whole, Random& random,
                  const std::string& where) {
  const AttentionCase longer = padded(c, random);
  Exact<float> y(c.outputs(), 0);
  Attention attention = longer.attention(y.data());
  attention.q = c.attention(nullptr).q;
  int64_t threads = 1;
  attend(attention, path, run_on_threads, &threads);
  check_same(whole, y, 0, where, "with keys behind that are hidden");
}

// Checks the order of sums that attention.inl states, in a few elements.
void check_order(const AttentionCase& c, const Exact<float>& y, Random& random, const std::string& where) {
  const Attention a = c.attention(nullptr);
  for (int i = 0; i < 4; ++i) {
    const int64_t index = random.between(0, y.size() - 1), row = index / c.width / c.heads();
    if (std::isnan(y[index])) continue;
    const int64_t head = index / c.width % c.heads(), column = index % c.width;
    const float wanted = attend_in_order(c, a, row / c.queries, head, row % c.queries, column);
    if (!same(y[index], wanted)) fail(where, number(y[index]) + " is not " + number(wanted) + ", the sum in order");
  }
}

void check(const AttentionCase& c, Random& random, const std::string& name) {
  Exact<float> first;  // the result of the first path with fused multiply-add
  const std::vector<const Path*> paths = supported_paths(c.arithmetic);
  for (const Path* path : paths) {
    if (path == &kPortable && paths.size() > 1 && random.chance(0.7)) continue;
    const std::string where = name + " path=" + path->name + " " + c.describe();
    Exact<float> whole = compute(c, *path, 1);
    if (first.size() == 0 || !fused(*path)) check_close(c, whole, where);
    check_same(whole, compute(c, *path, 3), 0, where, "on three threads");
    check_same(whole, compute_in_parts(c, *path, random), 0, where, "in other parts");
    check_same(whole, compute_without_subnormals(c, *path), 0, where, "where subnormals are zero");
    check_alone(c, *path, whole, random, where);
    if (c.finite) check_padded(c, *path, whole, random, where);
    if (!fused(*path)) continue;
    if (c.finite) check_order(c, whole, random, where);
    first.size() == 0 ? digest(whole) : check_same(first, whole, 0, where, "on this path");
    first = std::move(whole);
  }
}

// Large enough that a head's rows are divided into parts, and that sums have several chains.
void check_large(Random& random) {
  AttentionCase c;
  c.queries = 150, c.keys = 300, c.depth = 200, c.width = 40;
  c.q = Exact<float>(c.queries * c.depth, 0), c.k = Exact<float>(c.keys * c.depth, 0);
  c.v = Exact<float>(c.keys * c.width, 0);
  for (Exact<float>* values : {&c.q, &c.k, &c.v}) {
    for (int64_t i = 0; i < values->size(); ++i) (*values)[i] = random.normal();
  }
  for (c.arithmetic = Arithmetic::kFp32;; c.arithmetic = Arithmetic::kBf16) {
    check(c, random, "large");
    if (c.arithmetic == Arithmetic::kBf16) break;
  }
}

// Each row sees the 150 keys before it, so that the skipped keys begin and end at any panel, within chains of 128.
void check_window(Arithmetic arithmetic, float hidden, Random& random) {
  AttentionCase c;
  c.queries = c.keys = 300, c.depth = 20, c.width = 33;
  c.arithmetic = arithmetic;
  c.masked = c.along[2] = c.along[3] = true;
  c.q = Exact<float>(c.queries * c.depth, 0), c.k = Exact<float>(c.keys * c.depth, 0);
  c.v = Exact<float>(c.keys * c.width, 0), c.mask = Exact<float>(c.queries * c.keys, 0);
  for (Exact<float>* values : {&c.q, &c.k, &c.v}) {
    for (int64_t i = 0; i < values->size(); ++i) (*values)[i] = random.normal() * 4;
  }
  for (int64_t i = 0; i < c.mask.size(); ++i) {
    const int64_t behind = i / c.keys - i % c.keys;
    c.mask[i] = behind < 0 || behind > 150 ? hidden : random.normal();
  }
  check(c, random, "window");
  for (const Path* path : supported_paths(arithmetic)) {
    if (!fused(*path)) continue;
    const Exact<float> whole = compute(c, *path, 1);
    for (int i = 0; i < 50; ++i) check_order(c, whole, random, std::string("window path=") + path->name);
  }
  // A hidden value that is not finite: 0 times infinity is NaN, whether or not other keys are skipped.
  c.v[(c.keys - 1) * c.width] = std::numeric_limits<float>::infinity();
  for (const Path* path : supported_paths(arithmetic)) {
    const Exact<float> y = compute(c, *path, 1);
    for (int64_t i = 0; i < y.size(); i += c.width) {
      if (!std::isfinite(y[i])) continue;
      return fail(std::string("window path=") + path->name, "a row is finite beside 0 times infinity");
    }
  }
}

// The values are so large that their sum, weighted by up to 1, would overflow; their mean does not.
void check_overflow(Arithmetic arithmetic, int64_t queries, Random& random) {
  AttentionCase c;
  c.queries = queries, c.keys = 5000, c.depth = c.width = 32;
  c.arithmetic = arithmetic;
  c.q = Exact<float>(c.queries * c.depth, 0), c.k = Exact<float>(c.keys * c.depth, 0);
  c.v = Exact<float>(c.keys * c.width, 0);
  for (int64_t i = 0; i < c.q.size(); ++i) c.q[i] = random.normal() * 0.1f;
  for (int64_t i = 0; i < c.k.size(); ++i) c.k[i] = random.normal() * 0.1f;
  for (int64_t i = 0; i < c.v.size(); ++i) c.v[i] = 3e38f;
  check(c, random, "overflow");
}

// Without keys, the sums are empty, so y is 0. Without queries, there is no result.
void check_empty(Arithmetic arithmetic) {
  for (const Path* path : supported_paths(arithmetic)) {
    AttentionCase c;
    c.arithmetic = arithmetic;
    c.keys = 0, c.queries = 3, c.width = 5;
    const Exact<float> y = compute(c, *path, 1);
    for (int64_t i = 0; i < y.size(); ++i) {
      if (!same(y[i], 0.0f)) fail("empty", "an element without keys is " + number(y[i]));
    }
    c.keys = 3, c.queries = 0;
    compute(c, *path, 1);
  }
}

int run(int64_t cases, int64_t only) {
  if (only < 0) {
    Random random(g_seed, 0);
    check_large(random);
    for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
      check_empty(arithmetic);
      for (const int64_t queries : {1, 13}) check_overflow(arithmetic, queries, random);
      for (const float hidden : {kNever, -200.0f, -1e4f}) check_window(arithmetic, hidden, random);
    }
  }
  return run_cases(cases, only, " of attention", "", [](int64_t i) {
    Random random(g_seed, i);
    const AttentionCase c = draw_attention(random);
    check(c, random, "--only " + std::to_string(i));
  });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
