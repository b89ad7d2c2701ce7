// Compares convolutions with the products of their windows, bit for bit, and with float64, and blocks with their operations, in
// random cases, on every path that the processor supports.
//
//   conv_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>

#include "checks.h"
#include "gemm/block.h"

namespace bf16kit {
namespace {

// Draws the sizes of a convolution. Some are over a sequence: of height 1.
Image draw_image(Random& random, int64_t& batch, int64_t most_channels) {
  Image image = {};
  for (int i = 0; i < 2; ++i) {
    const bool flat = i == 0 && random.chance(0.3);
    image.kernel[i] = flat ? 1 : random.between(1, random.one_of<int64_t>({1, 3, 3, 5}));
    image.stride[i] = flat ? 1 : random.between(1, 3);
    image.dilation[i] = random.chance(0.7) ? 1 : random.between(2, 3);
    image.pad[i] = flat ? 0 : random.between(0, random.one_of<int64_t>({1, 2, 7}));
    const int64_t window = (image.kernel[i] - 1) * image.dilation[i] + 1, after = random.between(0, 2);
    const int64_t size = flat ? 1 : random.between(1, 14);
    (i == 0 ? image.height : image.width) = size;
    const int64_t padded = std::max(window, size + image.pad[i] + after);
    (i == 0 ? image.out_height : image.out_width) = (padded - window) / image.stride[i] + 1;
  }
  image.channels = random.between(1, most_channels);
  batch = random.between(1, 3);
  return image;
}

std::string describe(const Image& image, int64_t batch) {
  char text[200];
  std::snprintf(text, sizeof text, "batch=%d %dx%dx%d -> %dx%d kernel=%dx%d stride=%dx%d dilation=%dx%d pad=%dx%d ", int(batch),
                int(image.height), int(image.width), int(image.channels), int(image.out_height), int(image.out_width),
                int(image.kernel[0]), int(image.kernel[1]), int(image.stride[0]), int(image.stride[1]), int(image.dilation[0]),
                int(image.dilation[1]), int(image.pad[0]), int(image.pad[1]));
  return text;
}

// Returns the element of x that tap (i, j) of output pixel `pixel` reads, or -1 if it is outside of the image.
int64_t element(const Image& image, int64_t pixel, int64_t i, int64_t j, int64_t c) {
  const int64_t row = pixel / image.out_width % image.out_height, one = pixel / image.out_width / image.out_height;
  const int64_t down = row * image.stride[0] - image.pad[0] + i * image.dilation[0];
  const int64_t across = pixel % image.out_width * image.stride[1] - image.pad[1] + j * image.dilation[1];
  if (down < 0 || down >= image.height || across < 0 || across >= image.width) return -1;
  return ((one * image.height + down) * image.width + across) * image.channels + c;
}

Exact<float> draw(Random& random, int64_t size) {
  Exact<float> values(size, random.between(0, 3));
  for (int64_t i = 0; i < size; ++i) values[i] = random.normal();
  return values;
}

// Computes the convolution in random parts, or with multiply().
Exact<float> convolved(const Case& c, const Image& image, const Exact<float>& x, const Path& path, Random& random) {
  Exact<float> y(c.rows * c.n, 1);
  Product product = c.product(y.data());
  product.x = x.data(), product.image = &image, product.id = next_id();
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
  int64_t batch = 0;
  const Image image = draw_image(random, batch, random.one_of<int64_t>({8, 40, 140}));
  Case c;
  c.rows = batch * image.out_height * image.out_width;
  c.k = image.kernel[0] * image.kernel[1] * image.channels;
  c.n = random.between(1, 80);
  c.activation = random.one_of(kActivations);
  c.arithmetic = random.one_of({Arithmetic::kFp32, Arithmetic::kBf16});
  const Exact<float> x = draw(random, batch * image.height * image.width * image.channels);
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) {
    const int64_t tap = i % c.k / image.channels;
    const int64_t from = element(image, i / c.k, tap / image.kernel[1], tap % image.kernel[1], i % image.channels);
    c.x[i] = from < 0 ? 0 : x[from];
  }
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(random.normal());
  c.bias = draw(random, c.n);
  store_weight(c, random.between(0, 31));
  const Expected expected = expect(c);
  for (const Path* path : supported_paths(c.arithmetic)) {
    if (path == &kPortable && random.chance(0.7)) continue;
    const std::string where = name + " path=" + path->name + " " + describe(image, batch) + c.describe();
    const Exact<float> y = convolved(c, image, x, *path, random);
    check_close(y, expected, c.n, where);
    check_same(compute(c, *path, 0, c.rows), y, 0, c.n, where, "as a convolution");
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
    if (first.size() != 0) check_same(first, y, 0, channels, where, "on this path");
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
  for (const Path* path : supported_paths(arithmetic)) {
    const Path& fp32 = path->convolve == nullptr ? *supported_paths(Arithmetic::kFp32).back() : *path;
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
  }
}

int run(int64_t cases, int64_t only) {
  return run_cases(cases, only, " of convolution", "", [](int64_t i) {
    Random random(g_seed, i);
    (i % 4 == 0 ? check_block : i % 3 == 0 ? check_depthwise : check_dense)(random, "--only " + std::to_string(i));
  });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
