#include "gemm/block.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

namespace bf16kit {
namespace {

// The fewest pixels of a strip: products of fewer rows leave a part of their tiles empty.
constexpr int64_t kFewestPixels = 96;

// Computes rows [first, first + rows) of the output of images [one, one + images).
bool compute(const Block& block, const Path& products, const Path& pixels, int64_t one, int64_t images, int64_t first,
             int64_t rows, RunParts run, void* threads, unsigned cores) {
  Product wide = block.wide, narrow = block.narrow;
  Depthwise depthwise = block.depthwise;
  Image& image = depthwise.image;
  // The rows of the wide image that the windows of these read; all of them if there are more images behind it.
  const int64_t top = first * image.stride[0] - image.pad[0], height = image.height;
  const int64_t bottom = top + (rows - 1) * image.stride[0] + (image.kernel[0] - 1) * image.dilation[0] + 1;
  const int64_t begin = std::min(std::max<int64_t>(top, 0), height);
  const int64_t end = images > 1 ? height : std::min(std::max(bottom, begin), height);
  wide.rows = images * (end - begin) * image.width;
  narrow.rows = images * rows * image.out_width;
  const std::unique_ptr<float[]> memory(new (std::nothrow) float[(wide.rows + narrow.rows) * image.channels]);
  if (memory == nullptr) return false;
  wide.x += (one * height + begin) * image.width * wide.weight.k;
  wide.y = memory.get();
  depthwise.x = wide.y, depthwise.y = wide.y + wide.rows * image.channels;
  depthwise.batch = images;
  // Of windows that are all below the image, the pad is negative, and the image has no rows.
  image.height = end - begin, image.out_height = rows, image.pad[0] = begin - top;
  narrow.x = depthwise.y;
  narrow.y += (one * block.depthwise.image.out_height + first) * image.out_width * narrow.weight.n;
  if (!multiply(&wide, 1, products, run, threads, cores)) return false;
  convolve(depthwise, pixels, run, threads);
  return multiply(&narrow, 1, products, run, threads, cores);
}

void in_this_thread(void*, void (*part)(void*, size_t), size_t parts, void* context) {
  for (size_t i = 0; i < parts; ++i) part(context, i);
}

}  // namespace

bool convolve(const Block& block, const Path& products, const Path& pixels, RunParts run, void* threads, unsigned cores,
              int64_t strip) {
  const Image& image = block.depthwise.image;
  const int64_t batch = block.depthwise.batch, height = image.out_height;
  if (batch == 0 || height == 0 || image.out_width == 0) return true;
  // A strip of r rows reads stride · r rows of the wide image, and as many more as its windows overlap.
  const int64_t overlap = ((image.kernel[0] - 1) * image.dilation[0] + 1 - image.stride[0]) * image.width;
  const int64_t most = (strip / image.channels - overlap) / (image.stride[0] * image.width + image.out_width);
  const int64_t each = divide_up(height, std::min(std::max(most, divide_up(kFewestPixels, image.out_width)), height));
  const int64_t rows = divide_up(height, each), strips = batch * each;
  const bool few = strips < static_cast<int64_t>(cores) * (cores > 1 ? 2 : 1);
  if (few || height * image.out_width < kFewestPixels) {
    return compute(block, products, pixels, 0, batch, 0, height, run, threads, cores);
  }
  std::atomic<bool> failed{false};
  do_parts(kAlone * static_cast<double>(strips), run, threads, strips, [&](int64_t i) {
    const int64_t first = i % each * rows, some = std::min(rows, height - first);
    if (!compute(block, products, pixels, i / each, 1, first, some, in_this_thread, nullptr, 1)) failed = true;
  });
  return !failed;
}

}  // namespace bf16kit
