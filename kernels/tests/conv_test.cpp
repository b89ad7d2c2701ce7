// Compares convolutions with the products of their windows, bit for bit, and with float64, groups with convolutions of each, and
// blocks with their operations, in random cases, on every path that the processor supports.
//
//   conv_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>

#include "checks.h"
#include "gemm/block.h"
#include "windows.h"

namespace bf16kit {
namespace {

// Computes the convolution in random parts, or with multiply().
Exact<float> convolved(const Convolution& made, const Path& path, Random& random) {
  const Case& c = made.windows;
  Exact<float> y(c.rows * c.n, 1);
  Product product = c.product(y.data());
  product.x = made.x.data(), product.image = &made.image, product.id = next_id();
  int64_t threads = random.chance(0.1) ? 3 : 1;
  if (random.chance(0.5)) {
    multiply(&product, 1, path, run_on_threads, &threads);
    return y;
  }
  for (int64_t row = 0, rows; row < c.rows; row += rows) {
    rows = random.between(1, std::min(kRowBlock, c.rows - row));
    path.compute(c.arithmetic)(product, {row, rows, 0, product.weight.panels()});
  }
  return y;
}

void check_dense(Random& random, const std::string& name) {
  const Convolution made = draw_convolution(random);
  const Case& c = made.windows;
  const Expected expected = expect(c);
  const std::vector<const Path*> paths = supported_paths(c.arithmetic);
  for (const Path* path : paths) {
    if (path == &kPortable && paths.size() > 1 && random.chance(0.7)) continue;
    const std::string where = name + " path=" + path->name + " " + describe(made.image, made.batch) + c.describe();
    const Exact<float> y = convolved(made, *path, random);
    if (path == paths[0]) digest(y);
    check_close(y, expected, c.n, where);
    check_same(compute(c, *path, 0, c.rows), y, 0, c.n, where, "as a convolution");
  }
}

// Groups of channels, bit for bit against a convolution of each group by itself.
void check_groups(Random& random, const std::string& name) {
  Convolution all = draw_convolution(random);
  Case& whole = all.windows;
  const int64_t groups = random.between(2, 5), channels = random.between(1, random.one_of<int64_t>({8, 40, 70}));
  const int64_t n = random.one_of<int64_t>({random.between(1, 80), 16, 32, 48}), pixels = all.image.height * all.image.width;
  Image& image = all.image;
  image.groups = groups, image.channels = groups * channels;
  all.x = draw(random, all.batch * pixels * image.channels);
  whole.k = image.kernel[0] * image.kernel[1] * channels, whole.n = groups * n;
  whole.w.resize(whole.k * whole.n);
  for (uint16_t& value : whole.w) value = narrow(random.normal());
  whole.bias = draw(random, whole.n);
  store_weight(whole, random.between(0, 31));
  for (const Path* path : supported_paths(whole.arithmetic)) {
    const std::string where = name + " groups=" + std::to_string(groups) + " path=" + path->name + " " +
                              describe(image, all.batch) + whole.describe();
    const Exact<float> y = convolved(all, *path, random);
    for (int64_t g = 0; g < groups; ++g) {
      Convolution one;
      one.image = image, one.image.groups = 1, one.image.channels = channels, one.batch = all.batch;
      one.x = Exact<float>(all.batch * pixels * channels, 0);
      for (int64_t i = 0; i < one.x.size(); ++i) one.x[i] = all.x[i / channels * image.channels + g * channels + i % channels];
      Case& c = one.windows;
      c.rows = whole.rows, c.k = whole.k, c.n = n, c.activation = whole.activation, c.arithmetic = whole.arithmetic;
      for (int64_t i = 0; i < c.k * n; ++i) c.w.push_back(whole.w[i / n * whole.n + g * n + i % n]);
      c.bias = Exact<float>(n, 0);
      for (int64_t i = 0; i < n; ++i) c.bias[i] = whole.bias[g * n + i];
      store_weight(c, 0);
      Exact<float> columns(c.rows * n, 0);
      for (int64_t i = 0; i < columns.size(); ++i) columns[i] = y[i / n * whole.n + g * n + i % n];
      check_same(convolved(one, *path, random), columns, 0, n, where, "in groups");
    }
  }
}

// A convolution of each channel by itself, against float64; then each of the batch alone, and other paths, bit for bit.
void check_depthwise(Random& random, const std::string& name) {
  int64_t batch = 0;
  Image image = draw_image(random, batch, 100);
  image.channels += kFewestChannels - 1;
  const int64_t channels = image.channels, taps = image.kernel[0] * image.kernel[1];
  const int64_t pixels = image.out_height * image.out_width, size = image.height * image.width * channels;
  const Exact<float> x = draw(random, batch * size), w = draw(random, taps * channels), bias = draw(random, channels);
  const Activation activation = random.one_of({Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kSilu});
  Expected expected;
  for (int64_t i = 0; i < batch * pixels * channels; ++i) {
    const int64_t c = i % channels;
    double sum = bias[c], magnitude = std::fabs(bias[c]);
    for (int64_t t = 0; t < taps; ++t) {
      const int64_t from = element(image, i / channels, t / image.kernel[1], t % image.kernel[1], c);
      if (from < 0) continue;
      sum += static_cast<double>(x[from]) * w[t * channels + c];
      magnitude += std::fabs(static_cast<double>(x[from]) * w[t * channels + c]);
    }
    expected.y.push_back(activate(activation, sum));
    expected.tolerance.push_back(1.13 * static_cast<double>(taps + 2) * kUnit * magnitude + tolerance(activation, sum));
  }
  Exact<float> first;
  for (const Path* path : supported_paths(Arithmetic::kFp32)) {
    const std::string where = name + " depthwise path=" + path->name + " " + describe(image, batch);
    Exact<float> y(batch * pixels * channels, 1), alone(pixels * channels, 1);
    Depthwise depthwise = {x.data(), batch, image, w.data(), bias.data(), activation, y.data()};
    int64_t threads = random.chance(0.1) ? 3 : 1;
    convolve(depthwise, *path, run_on_threads, &threads);
    check_close(y, expected, channels, where);
    const int64_t one = random.between(0, batch - 1);
    depthwise.x += one * size, depthwise.batch = 1, depthwise.y = alone.data();
    path->convolve(depthwise, 0, image.out_height);
    check_same(y, alone, one * pixels, channels, where, "alone");
    if (!fused(*path)) continue;
    first.size() == 0 ? digest(y) : check_same(first, y, 0, channels, where, "on this path");
    first = std::move(y);
  }
}

// A block, in strips of any size, against its three operations one after the other, bit for bit.
void check_block(Random& random, const std::string& name) {
  int64_t batch = 0;
  Image image = draw_image(random, batch, 70);
  image.channels += kFewestChannels - 1;
  // Sometimes high enough for several strips, sometimes padded so far that windows are outside of the image.
  if (random.chance(0.7)) image.height += 20, image.out_height += 20 / image.stride[0];
  if (random.chance(0.1)) image.pad[0] += 40;
  const Arithmetic arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  const Activation activation = random.one_of({Activation::kNone, Activation::kRelu, Activation::kRelu6, Activation::kSilu});
  const int64_t pixels = batch * image.height * image.width, out = batch * image.out_height * image.out_width;
  const int64_t k = random.between(1, 40), n = random.between(1, 70), taps = image.kernel[0] * image.kernel[1];
  Case wide, narrow;
  const auto fill = [&](Case& c, int64_t rows, int64_t inner, int64_t columns, Activation function) {
    c.rows = rows, c.k = inner, c.n = columns, c.activation = function, c.arithmetic = arithmetic;
    c.w.resize(inner * columns);
    for (uint16_t& value : c.w) value = bf16kit::narrow(random.normal());
    c.bias = draw(random, columns);
    store_weight(c, random.between(0, 31));
  };
  fill(wide, pixels, k, image.channels, activation);
  fill(narrow, out, image.channels, n, Activation::kNone);
  wide.x = draw(random, pixels * k);
  const Exact<float> w = draw(random, taps * image.channels), bias = draw(random, image.channels);
  const std::vector<const Path*> paths = supported_paths(arithmetic);
  for (const Path* path : paths) {
    const Path& fp32 = path->convolve == nullptr ? *supported_paths(Arithmetic::kFp32)[0] : *path;
    const std::string where = name + " block path=" + path->name + " " + describe(image, batch) + wide.describe();
    Exact<float> between(pixels * image.channels, 1), after(out * image.channels, 1), right(out * n, 1), y(out * n, 1);
    int64_t threads = random.chance(0.1) ? 3 : 1;
    const auto product = [](const Case& c, const float* x, float* to) {
      Product made = c.product(to);
      made.x = x;
      return made;
    };
    Product first = product(wide, wide.x.data(), between.data()), last = product(narrow, after.data(), right.data());
    Depthwise depthwise = {between.data(), batch, image, w.data(), bias.data(), activation, after.data()};
    multiply(&first, 1, *path, run_on_threads, &threads);
    convolve(depthwise, fp32, run_on_threads, &threads);
    multiply(&last, 1, *path, run_on_threads, &threads);
    depthwise.x = depthwise.y = nullptr;
    const Block block = {product(wide, wide.x.data(), nullptr), depthwise, product(narrow, nullptr, y.data())};
    convolve(block, *path, fp32, run_on_threads, &threads, random.between(1, 4), random.between(1, 60000));
    check_same(right, y, 0, n, where, "as a block");
    if (path == paths[0]) digest(y);
  }
}

int run(int64_t cases, int64_t only) {
  return run_cases(cases, only, " of convolution", "", [](int64_t i) {
    Random random(g_seed, i);
    const auto check = i % 4 == 0 ? check_block : i % 3 == 0 ? check_depthwise : i % 5 == 0 ? check_groups : check_dense;
    check(random, "--only " + std::to_string(i));
  });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
