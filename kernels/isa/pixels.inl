// The window of a convolution's output pixel as a row of x. Included by part.inl, so compiled for each path.

// Copies the window of output pixel `pixel` in the channels of a group to `to`, with zeros outside of the image.
inline void copy_window(const Image& image, const float* x, int64_t pixel, int64_t group, float* to) {
  const int64_t channels = image.channels / image.groups, line = image.width * image.channels;
  const int64_t left = pixel % image.out_width * image.stride[1] - image.pad[1];
  const int64_t row = pixel / image.out_width;
  const int64_t top = row % image.out_height * image.stride[0] - image.pad[0];
  const float* first = x + row / image.out_height * image.height * line + group * channels;
  // Neighbouring pixels are copied at once where all of them are inside.
  const bool joined = image.groups == 1 && image.dilation[1] == 1 && left >= 0 && left + image.kernel[1] <= image.width;
  const int64_t copies = joined ? 1 : image.kernel[1], length = joined ? image.kernel[1] * channels : channels;
  for (int64_t i = 0; i < image.kernel[0]; ++i) {
    const int64_t down = top + i * image.dilation[0];
    for (int64_t j = 0; j < copies; ++j, to += length) {
      const int64_t across = left + j * image.dilation[1];
      if (down < 0 || down >= image.height || across < 0 || across >= image.width) {
        std::memset(to, 0, sizeof(float) * length);
      } else {
        std::memcpy(to, first + down * line + across * image.channels, sizeof(float) * length);
      }
    }
  }
}
