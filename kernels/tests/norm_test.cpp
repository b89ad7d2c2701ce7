// Compares residual sums and their normalisation with float64 in random cases, on every path that the processor supports.
//
//   norm_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>

#include "checks.h"
#include "gemm/norm.h"

namespace bf16kit {
namespace {

void fail(int64_t index, const Path& path, const Norm& norm, const char* what) {
  ++g_failures;
  std::printf("FAIL --seed %llu --only %lld path=%s rows=%lld width=%lld: %s\n", static_cast<unsigned long long>(g_seed),
              static_cast<long long>(index), path.name, static_cast<long long>(norm.rows),
              static_cast<long long>(norm.width), what);
}

// Runs the parts in reverse order: nothing may depend on the order.
void run_backwards(void*, void (*part)(void*, size_t), size_t parts, void* context) {
  for (size_t i = parts; i > 0; --i) part(context, i - 1);
}

Exact<float> draw(Random& random, int64_t size, float scale, float offset) {
  Exact<float> values(size, random.between(0, 3));
  for (int64_t i = 0; i < size; ++i) values[i] = random.normal() * scale + offset;
  return values;
}

// Checks row `row` against float64 from the same s, within the bounds of all roundings. Without a bias, the sign of a zero must
// be that of s times scale.
bool close(const Norm& norm, const float* s, int64_t row) {
  double sum = 0, squares = 0, most = 0;
  for (int64_t i = 0; i < norm.width; ++i) sum += s[i];
  const double mean = norm.kind == NormKind::kRms ? 0 : sum / norm.width;
  for (int64_t i = 0; i < norm.width; ++i) {
    squares += (s[i] - mean) * (s[i] - mean), most = std::max(most, std::fabs(s[i] - mean));
  }
  const double r = 1 / std::sqrt(squares / norm.width + norm.epsilon), unit = 0x1p-24;
  for (int64_t i = 0; i < norm.width; ++i) {
    const double bias = norm.bias == nullptr ? 0 : norm.bias[i], normal = (s[i] - mean) * r;
    const double wanted = normal * norm.scale[i] + bias, steps = norm.width / 32.0 + 16;
    const double rounded = most + unit * steps * std::fabs(mean);  // the largest deviation from the mean in fp32
    const double off = unit * (steps * (rounded * r + std::fabs(normal)) * std::fabs(norm.scale[i]) + std::fabs(wanted));
    const float y = norm.y[row * norm.width + i];
    if (!(std::fabs(y - wanted) <= off)) return false;
    if (norm.bias == nullptr && mean == 0 && s[i] == 0 && !same(y, s[i] * norm.scale[i])) return false;
  }
  return true;
}

void check(int64_t index) {
  Random random(g_seed, index);
  Norm norm = {};
  norm.kind = random.one_of({NormKind::kLayer, NormKind::kRms});
  norm.rows = random.between(1, 20);
  norm.width = random.chance(0.02) ? random.between(4000, 9000) : random.between(1, random.one_of<int64_t>({40, 130, 800}));
  norm.epsilon = random.one_of({1e-12f, 1e-5f});
  const float scale = random.one_of({1.0f, 30.0f, 0.01f}), offset = random.chance(0.3) ? random.one_of({5.0f, 1e3f, 1e5f}) : 0;
  const int64_t size = norm.rows * norm.width;
  Exact<float> x = draw(random, size, scale, offset), skip = draw(random, size, scale, 0);
  if (random.chance(0.1)) x[random.between(0, size - 1)] = -0.0f;
  const Exact<float> weights = draw(random, norm.width, 1, 0), bias = draw(random, norm.width, 1, 0);
  norm.x = x.data(), norm.scale = weights.data();
  if (norm.kind == NormKind::kLayer || random.chance(0.7)) norm.skip = skip.data();
  if (random.chance(0.7)) norm.bias = bias.data();
  Exact<float> first;
  for (const Path* path : supported_paths(Arithmetic::kFp32)) {
    Exact<float> y(size, 1), sum(size, 2), alone(norm.width, 1);
    norm.y = y.data(), norm.sum = norm.skip != nullptr && random.chance(0.5) ? sum.data() : nullptr;
    normalise(norm, *path, run_backwards, nullptr);
    std::vector<float> s(norm.width);
    for (int64_t row = 0; row < norm.rows; ++row) {
      for (int64_t i = 0; i < norm.width; ++i) {
        s[i] = norm.x[row * norm.width + i];
        if (norm.skip != nullptr) s[i] += norm.skip[row * norm.width + i];
        if (norm.sum != nullptr && !same(s[i], sum[row * norm.width + i])) return fail(index, *path, norm, "the sum");
      }
      if (!close(norm, s.data(), row)) return fail(index, *path, norm, "a row is not within the bound");
    }
    Norm one = norm;
    const int64_t row = random.between(0, norm.rows - 1);
    one.rows = 1, one.x += row * norm.width, one.y = alone.data(), one.sum = nullptr;
    if (one.skip != nullptr) one.skip += row * norm.width;
    normalise(one, *path, run_backwards, nullptr);
    for (int64_t i = 0; i < norm.width; ++i) {
      if (!same(alone[i], y[row * norm.width + i])) return fail(index, *path, norm, "a row alone has other bits");
    }
    if (path == &kPortable) continue;
    if (first.size() == 0) digest(y);
    for (int64_t i = 0; i < first.size(); ++i) {
      if (!same(first[i], y[i])) return fail(index, *path, norm, "another path has other bits");
    }
    first = std::move(y);
  }
}

int run(int64_t cases, int64_t only) {
  return run_cases(cases, only, " of normalisation", "", [](int64_t i) { check(i); });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
