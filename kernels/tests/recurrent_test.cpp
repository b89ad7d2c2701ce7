// Compares random LSTMs and GRUs with float64, on every path that the processor supports.
//
//   recurrent_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>

#include "checks.h"
#include "gemm/recurrent.h"

namespace bf16kit {
namespace {

struct Tensors {
  Exact<float> x, bias, h, c;
  Exact<uint16_t> w[2], r[2];
};

struct Outputs {
  Exact<float> y, h, c;
};

void fail(int64_t index, const Path& path, const Recurrence& a, const char* what) {
  ++g_failures;
  std::printf("FAIL --seed %llu --only %lld path=%s %s %s steps=%lld batch=%lld inputs=%lld hidden=%lld directions=%lld: %s\n",
              static_cast<unsigned long long>(g_seed), static_cast<long long>(index), path.name,
              a.cell == Cell::kLstm ? "lstm" : "gru", a.arithmetic == Arithmetic::kFp32 ? "fp32" : "bf16",
              static_cast<long long>(a.steps), static_cast<long long>(a.batch), static_cast<long long>(a.inputs),
              static_cast<long long>(a.hidden), static_cast<long long>(a.directions), what);
}

Exact<float> draw(Random& random, int64_t size, float scale) {
  Exact<float> values(size, random.between(0, 3));
  for (int64_t i = 0; i < size; ++i) values[i] = random.normal() * scale;
  return values;
}

Exact<uint16_t> draw_weight(Random& random, int64_t size, float scale) {
  Exact<uint16_t> values(size, random.between(0, 31));
  for (int64_t i = 0; i < size; ++i) values[i] = narrow(random.normal() * scale);
  return values;
}

Recurrence draw_recurrence(Random& random, Tensors& t) {
  Recurrence a = {};
  a.cell = random.one_of({Cell::kLstm, Cell::kGru});
  a.arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  a.steps = random.between(1, 9), a.batch = random.between(1, random.one_of<int64_t>({1, 3, 9, 20}));
  a.inputs = random.between(1, random.one_of<int64_t>({20, 80, 300})), a.hidden = random.between(1, random.one_of<int64_t>({20, 70, 150}));
  if (random.chance(0.05)) a.hidden = random.one_of<int64_t>({16, 32, 64, 128, 256});
  if (random.chance(0.02)) a.steps = random.between(100, 600), a.hidden = random.between(1, 20);
  if (random.chance(0.02)) a.hidden = random.between(500, 700), a.steps = 2, a.batch = random.between(1, 5);
  a.directions = random.between(1, 2), a.reverse = a.directions == 1 && random.chance(0.5);
  const int count = gates(a.cell);
  for (int i = 0; i < count; ++i) a.blocks[i] = i;
  for (int i = count; i > 1; --i) std::swap(a.blocks[i - 1], a.blocks[random.between(0, i - 1)]);
  const float scale = random.one_of({1.0f, 1.0f, 1e-3f, 10.0f, 1e-20f});
  const int64_t wide = count * a.hidden, states = a.directions * a.batch * a.hidden;
  t.x = draw(random, a.steps * a.batch * a.inputs, scale);
  if (random.chance(0.1)) t.x[random.between(0, t.x.size() - 1)] = std::nanf("");
  for (int64_t d = 0; d < a.directions; ++d) {
    t.w[d] = draw_weight(random, wide * a.inputs, 1 / std::sqrt(static_cast<float>(a.inputs)));
    t.r[d] = draw_weight(random, wide * a.hidden, 1 / std::sqrt(static_cast<float>(a.hidden)));
    a.w[d] = t.w[d].data(), a.r[d] = t.r[d].data();
  }
  t.bias = draw(random, a.directions * 2 * wide, scale), t.h = draw(random, states, 1), t.c = draw(random, states, scale);
  a.x = t.x.data();
  if (random.chance(0.7)) a.bias = t.bias.data();
  if (random.chance(0.5)) a.h = t.h.data();
  if (random.chance(0.5) && a.cell == Cell::kLstm) a.c = t.c.data();
  return a;
}

Outputs compute(Recurrence a, const Path& path, int64_t threads, unsigned cores, bool give_y = true) {
  const int64_t states = a.directions * a.batch * a.hidden;
  Outputs out = {Exact<float>(a.steps * states, 1), Exact<float>(states, 2), Exact<float>(states, 3)};
  a.y = give_y ? out.y.data() : nullptr, a.last_h = out.h.data();
  a.last_c = a.cell == Cell::kLstm ? out.c.data() : nullptr;
  recur(a, path, run_on_threads, &threads, cores);
  return out;
}

struct Bounded {
  double value = 0, error = 0;
};

Bounded sigmoid(const Bounded& g) {
  const double value = 1 / (1 + std::exp(-g.value));
  return {value, g.error / 4 + 6 * kUnit * value + 0x1p-61};
}
Bounded tangent(const Bounded& g) {
  const double value = std::tanh(g.value);
  return {value, g.error + 8 * kUnit * std::fabs(value) + 2 * kSmallest};
}
Bounded times(const Bounded& a, const Bounded& b) {
  const double value = a.value * b.value;
  return {value, std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error + 2 * kUnit * std::fabs(value)};
}
Bounded plus(const Bounded& a, const Bounded& b) {
  return {a.value + b.value, a.error + b.error + 2 * kUnit * std::fabs(a.value + b.value)};
}

// Returns the sum of row `row` of a weight times `x`, with the error of fp32 sums of `additions` in a row.
Bounded dot(const Recurrence& a, const uint16_t* weight, int64_t row, int64_t k, const float* x, double additions) {
  double sum = 0, size = 0;
  for (int64_t i = 0; i < k; ++i) {
    const double term = static_cast<double>(taken(x[i], a.arithmetic)) * taken(static_cast<float>(widen(weight[row * k + i])), a.arithmetic);
    sum += term, size += std::fabs(term);
  }
  const double lost = a.arithmetic == Arithmetic::kBf16 ? 0x1p-126 * static_cast<double>(k) : kSmallest;
  return {sum, kUnit * additions * size * 1.001 + lost};
}

// Checks one row of y of every step against float64. Each step takes the h that the kernel computed before it, so that errors do
// not grow from step to step; c is float64's own.
bool row_close(const Recurrence& a, const Outputs& out, int64_t direction, int64_t row) {
  const int count = gates(a.cell);
  const int64_t wide = count * a.hidden, state = (direction * a.batch + row) * a.hidden;
  std::vector<float> h(a.hidden, 0);
  std::vector<Bounded> c(a.hidden);
  for (int64_t u = 0; u < a.hidden; ++u) {
    if (a.h != nullptr) h[u] = a.h[state + u];
    if (a.c != nullptr) c[u].value = a.c[state + u];
  }
  const bool back = direction == 1 || a.reverse;
  for (int64_t i = 0; i < a.steps; ++i) {
    const int64_t t = back ? a.steps - 1 - i : i;
    const float* x = a.x + (t * a.batch + row) * a.inputs;
    const float* y = out.y.data() + ((t * a.directions + direction) * a.batch + row) * a.hidden;
    for (int64_t u = 0; u < a.hidden; ++u) {
      Bounded input[4], inner[4], whole[4];
      for (int g = 0; g < count; ++g) {
        const int64_t at = a.blocks[g] * a.hidden + u;
        const float* bias = a.bias == nullptr ? nullptr : a.bias + direction * 2 * wide + g * a.hidden + u;
        input[g] = dot(a, a.w[direction], at, a.inputs, x, 130 + a.inputs / 128.0);
        inner[g] = dot(a, a.r[direction], at, a.hidden, h.data(), 8 + a.hidden / 16.0);
        input[g] = plus(input[g], {bias == nullptr ? 0.0 : bias[0], 0});
        inner[g] = plus(inner[g], {bias == nullptr ? 0.0 : bias[wide], bias == nullptr ? 0.0 : 2 * kUnit * (std::fabs(bias[0]) + std::fabs(bias[wide]))});
        whole[g] = plus(input[g], inner[g]);
        whole[g].error += 2 * kUnit * (std::fabs(input[g].value) + std::fabs(inner[g].value));
      }
      Bounded wanted;
      if (a.cell == Cell::kLstm) {
        c[u] = plus(times(sigmoid(whole[2]), c[u]), times(sigmoid(whole[0]), tangent(whole[3])));
        wanted = times(sigmoid(whole[1]), tangent(c[u]));
      } else {
        const Bounded z = sigmoid(whole[0]), next = tangent(plus(input[2], times(sigmoid(whole[1]), inner[2])));
        const double off = h[u] - next.value;
        wanted = plus(next, times(z, {off, next.error + 2 * kUnit * std::fabs(off)}));
      }
      if (!close(y[u], wanted.value, wanted.error + (a.arithmetic == Arithmetic::kBf16 ? 0x1p-120 : 0x1p-140))) return false;
    }
    std::copy(y, y + a.hidden, h.begin());
  }
  for (int64_t u = 0; u < a.hidden; ++u) {
    if (!same(h[u], out.h[state + u])) return false;
    if (a.cell == Cell::kLstm && !close(out.c[state + u], c[u].value, c[u].error + 0x1p-120)) return false;
  }
  return true;
}

bool equal(const Exact<float>& a, const Exact<float>& b) {
  for (int64_t i = 0; i < a.size(); ++i) {
    if (!same(a[i], b[i])) return false;
  }
  return true;
}

// Returns only row `row` of `from`, [blocks, batch, width].
Exact<float> row_of(const float* from, int64_t blocks, int64_t batch, int64_t row, int64_t width) {
  Exact<float> found(blocks * width, 1);
  for (int64_t i = 0; i < blocks; ++i) std::copy_n(from + (i * batch + row) * width, width, found.data() + i * width);
  return found;
}

void check(int64_t index) {
  Random random(g_seed, index);
  Tensors t;
  const Recurrence a = draw_recurrence(random, t);
  const bool lstm = a.cell == Cell::kLstm;
  Outputs first;
  const std::vector<const Path*> paths = supported_paths(a.arithmetic);
  for (const Path* path : paths) {
    if (path == &kPortable && paths.size() > 1 && random.chance(0.7)) continue;  // it would take most of the time
    Outputs out = compute(a, *path, 1, 1);
    const int64_t row = random.between(0, a.batch - 1), direction = random.between(0, a.directions - 1);
    if (!row_close(a, out, direction, row)) return fail(index, *path, a, "a row is not within the bound");
    const Outputs many = compute(a, *path, random.between(2, 4), random.one_of({3u, 96u}), random.chance(0.5));
    if (!equal(many.h, out.h) || (lstm && !equal(many.c, out.c))) return fail(index, *path, a, "threads change bits");
    Recurrence one = a;
    one.batch = 1;
    const Exact<float> x = row_of(a.x, a.steps, a.batch, row, a.inputs), h = row_of(t.h.data(), a.directions, a.batch, row, a.hidden),
                       c = row_of(t.c.data(), a.directions, a.batch, row, a.hidden);
    one.x = x.data(), one.h = a.h == nullptr ? nullptr : h.data(), one.c = a.c == nullptr ? nullptr : c.data();
    const Outputs alone = compute(one, *path, 1, 1);
    if (!equal(alone.y, row_of(out.y.data(), a.steps * a.directions, a.batch, row, a.hidden)) ||
        (lstm && !equal(alone.c, row_of(out.c.data(), a.directions, a.batch, row, a.hidden)))) {
      return fail(index, *path, a, "a row alone has other bits");
    }
    if (!fused(*path)) continue;
    if (first.y.size() == 0) digest(out.y), digest(out.h);
    else if (!equal(first.y, out.y)) return fail(index, *path, a, "another path has other bits");
    first = std::move(out);
  }
}

int run(int64_t cases, int64_t only) {
  return run_cases(cases, only, " of recurrences", "", [](int64_t i) { check(i); });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
