// dayzero::block_range and dayzero::integer_codes: weights to few bits at the speed of memory, row by row. One thread each:
// conversion has threads of its own.
#include <ATen/ATen.h>
#include <torch/library.h>
#include "state.h"

namespace dayzero {
namespace {

at::Tensor checked_rows(const at::Tensor& x, int64_t width, const char* name) {
  TORCH_CHECK(x.dim() == 2 && is_kernel_type(x.scalar_type()), name, ": x must be [rows, columns] in float32, bfloat16 or float16");
  TORCH_CHECK(width > 0, name, ": blocks must have columns");
  return x.contiguous();
}

// The least and the greatest value of every `width` columns of each row; NaN where one is not finite.
std::tuple<at::Tensor, at::Tensor> block_range(const at::Tensor& x_in, int64_t width) {
  auto x = checked_rows(x_in, width, "dayzero::block_range");
  int64_t rows = x.size(0), columns = x.size(1), blocks = (columns + width - 1) / width;
  auto options = x.options().dtype(at::kFloat);
  auto low = at::empty({rows, blocks}, options), high = at::empty({rows, blocks}, options);
  for (int64_t r = 0; r < rows; r++)
    kernels().range_row({(const char*)x.const_data_ptr() + r * columns * x.element_size(), kernel_type(x.scalar_type()), columns, width,
                         low.mutable_data_ptr<float>() + r * blocks, high.mutable_data_ptr<float>() + r * blocks});
  return {low, high};
}

// Codes of x with a scale [rows, blocks] (and a zero point) for every `width` columns, packed into 32-bit words or not, and
// five sums: squares of error, weight and what the codes stand for, their product, and the largest error.
std::tuple<at::Tensor, at::Tensor> integer_codes(const at::Tensor& x_in, const at::Tensor& scales_in, const std::optional<at::Tensor>& zeros_in,
                                                 int64_t width, int64_t bits, bool packed) {
  auto x = checked_rows(x_in, width, "dayzero::integer_codes");
  int64_t rows = x.size(0), columns = x.size(1), blocks = (columns + width - 1) / width, words = (columns * bits + 31) / 32;
  TORCH_CHECK(bits == 4 || bits == 8, "dayzero::integer_codes: 4 or 8 bits");
  auto scales = scales_in.to(at::kFloat).contiguous();
  auto zeros = zeros_in ? std::optional<at::Tensor>(zeros_in->to(at::kChar).contiguous()) : std::nullopt;
  TORCH_CHECK(scales.dim() == 2 && scales.size(0) == rows && scales.size(1) == blocks, "dayzero::integer_codes: scales must be [", rows, ", ", blocks, "]");
  TORCH_CHECK(!zeros || zeros->sizes() == scales.sizes(), "dayzero::integer_codes: zero points must be as many as scales");
  auto out = packed ? at::empty({rows, words}, x.options().dtype(at::kInt)) : at::empty({rows, columns}, x.options().dtype(at::kChar));
  auto sums = at::zeros({5}, x.options().dtype(at::kDouble));
  std::vector<int8_t> line(packed ? columns : 0);
  float least = -float(1 << (bits - 1)), greatest = -least - 1;
  for (int64_t r = 0; r < rows; r++) {
    int8_t* codes = packed ? line.data() : out.mutable_data_ptr<int8_t>() + r * columns;
    kernels().codes_row({(const char*)x.const_data_ptr() + r * columns * x.element_size(), kernel_type(x.scalar_type()), columns, width,
                         scales.const_data_ptr<float>() + r * blocks, zeros ? zeros->const_data_ptr<int8_t>() + r * blocks : nullptr,
                         least, greatest, codes, sums.mutable_data_ptr<double>()});
    if (packed) kernels().pack_row(codes, columns, int(bits), (uint32_t*)out.mutable_data_ptr<int32_t>() + r * words);
  }
  return {out, sums};
}

}  // namespace
}  // namespace dayzero

TORCH_LIBRARY_IMPL(dayzero, CPU, m) {
  m.impl("block_range", dayzero::block_range);
  m.impl("integer_codes", dayzero::integer_codes);
}
