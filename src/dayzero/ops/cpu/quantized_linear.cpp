// dayzero::quantized_linear_at, quantized_linears_at and dequantized: linear layers whose weights stay in few bits. Rows that
// decode go through the row kernels; each prefill chunk by itself, over weights that are made plain a tile at a time. Where
// integers meet integers the sums are exact, and every row has the same bits in any company.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include "state.h"

namespace dayzero {
namespace {

// Rows of unknown origin (no step): up to this many are treated as decoding. As in linear.cpp.
constexpr int64_t kFewRows = 64;
constexpr int64_t kGrainBytes = 48 * 1024;
// Plain weights are made and multiplied a tile at a time; a tile should stay in a level-3 cache.
constexpr int64_t kPlainTileBytes = 4 << 20;
// From this many rows on a library's product of integers is faster than ours, where it is right.
constexpr int64_t kLibraryIntegerRows = 5;
// Vectors decode codes again for every 4 rows. Beyond that tiles win, which need 16 rows no more time than one (measured with
// int8 and 4-bit weights of 8192 x 2048: 1.6 to 1.9 times plain bfloat16 for one row by vectors, about the same by tiles; for
// 8 rows 0.4 by vectors).
constexpr int64_t kRowsInRegisters = 4;
// Numbers of some columns at a time, inside a level-2 cache; 16 columns are a tile, and four tiles go at once.
constexpr int64_t kBufferBytes = 256 << 10;

struct Form { CodeType code; int64_t block_rows, block_columns; Activations activations; };
struct Part { at::Tensor codes, scales; std::optional<at::Tensor> zeros, bias; };

int64_t rounded_up(int64_t n, int64_t block) { return (n + block - 1) / block * block; }
ScaleType scale_type(at::ScalarType type) {
  return type == at::kByte ? ScaleType::exponent : type == at::kFloat ? ScaleType::f32 : type == at::kBFloat16 ? ScaleType::bf16 : ScaleType::f16;
}

Form checked_form(int64_t code, int64_t block_rows, int64_t block_columns, int64_t activations) {
  TORCH_CHECK(code >= 0 && code <= 4 && activations >= 0 && activations <= 2, "dayzero::quantized: code ", code, ", activations ", activations);
  TORCH_CHECK(block_rows > 0 && block_columns >= 0 && block_columns % 32 == 0, "dayzero::quantized: blocks of ", block_rows, " x ", block_columns);
  return {CodeType(code), block_rows, block_columns, Activations(activations)};
}

// Dense parts that fit a matrix of K columns. Codes may be of any type: only their bytes count.
Part checked_part(Part part, int64_t K, const Form& form) {
  auto& [codes, scales, zeros, bias] = part;
  TORCH_CHECK(codes.dim() == 2 && scales.dim() == 2, "dayzero::quantized: codes and scales must be matrices, got ", codes.sizes(), " and ", scales.sizes());
  int64_t N = codes.size(0), bytes = codes.size(1) * codes.element_size();
  int64_t needed = form.code == CodeType::nibble || form.code == CodeType::fp4 ? (K + 1) / 2 : K;
  int64_t down = rounded_up(N, form.block_rows) / form.block_rows, across = form.block_columns ? rounded_up(K, form.block_columns) / form.block_columns : 1;
  TORCH_CHECK(bytes >= needed, "dayzero::quantized: rows of ", bytes, " bytes do not hold ", K, " codes");
  TORCH_CHECK(scales.size(0) == down && scales.size(1) == across, "dayzero::quantized: scales must be [", down, ", ", across, "], got ", scales.sizes());
  TORCH_CHECK(scales.scalar_type() == at::kByte || is_kernel_type(scales.scalar_type()), "dayzero::quantized: scales of ", scales.scalar_type());
  TORCH_CHECK(!zeros || (zeros->sizes() == scales.sizes() && zeros->scalar_type() == at::kChar), "dayzero::quantized: zero points must be int8, as many as scales");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == N), "dayzero::quantized: bias must be [", N, "]");
  codes = codes.stride(1) == 1 ? codes : codes.contiguous();
  scales = scales.contiguous();
  if (zeros) zeros = zeros->contiguous();
  if (bias) bias = bias->contiguous();
  return part;
}

QuantizedWeight weight_of(const Part& part, const Form& form) {
  return {(const uint8_t*)part.codes.const_data_ptr(), part.codes.stride(0) * part.codes.element_size(), form.code, part.scales.const_data_ptr(),
          part.scales.stride(0), scale_type(part.scales.scalar_type()), part.zeros ? part.zeros->const_data_ptr<int8_t>() : nullptr,
          form.block_rows, form.block_columns};
}

QuantizedCall call_of(const at::Tensor& x, const Part& part, const Form& form, float input_scale, at::Tensor& out) {
  LinearCall linear{x.const_data_ptr(), x.stride(0), kernel_type(x.scalar_type()), nullptr, 0, DType::f32, part.bias ? part.bias->const_data_ptr() : nullptr,
                    part.bias ? kernel_type(part.bias->scalar_type()) : DType::f32, out.data_ptr(), out.stride(0), x.size(0), part.codes.size(0), x.size(1)};
  return {linear, weight_of(part, form), form.activations, input_scale};
}

// Several weights over the same rows as one parallel region, as in linear.cpp. Rows are packed once.
void by_row(const KernelTable& table, const at::Tensor& x, const std::vector<Part>& parts, const Form& form, float input_scale, std::vector<at::Tensor>& out) {
  std::vector<QuantizedCall> calls;
  std::vector<int64_t> first_unit;
  int64_t units = 0, widest = 1;
  for (size_t i = 0; i < parts.size(); i++) {
    calls.push_back(call_of(x, parts[i], form, input_scale, out[i]));
    first_unit.push_back(units);
    units += rounded_up(calls[i].linear.N, kColumnUnit) / kColumnUnit;
    widest = std::max<int64_t>(widest, kColumnUnit * calls[i].w.code_stride);
  }
  void* packed = scratch(kScratchPack, table.quantized_pack_bytes(calls[0]));
  table.quantized_pack(calls[0], packed);
  at::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / widest), [&](int64_t begin, int64_t end) {
    int64_t column_bytes = rounded_up(x.size(1), 32) * sizeof(float), columns = std::clamp<int64_t>(kBufferBytes / column_bytes / 16 * 16, 16, 64);
    void* buffer = scratch(kScratchPartial, columns * column_bytes);
    for (size_t i = 0; i < calls.size(); i++) {
      int64_t part_units = rounded_up(calls[i].linear.N, kColumnUnit) / kColumnUnit;
      int64_t first = std::max<int64_t>(begin - first_unit[i], 0), last = std::min(end - first_unit[i], part_units);
      if (first < last) table.quantized_columns(calls[i], packed, buffer, columns, first * kColumnUnit, std::min(last * kColumnUnit, calls[i].linear.N));
    }
  });
}

// Rows as the codes they are rounded to, in float32 [M, K], and the rows' scales [M].
std::tuple<at::Tensor, at::Tensor> activation_codes(const QuantizedCall& call) {
  auto codes = at::empty({call.linear.M, call.linear.K}, at::kFloat), scales = at::empty({call.linear.M}, at::kFloat);
  const KernelTable& table = kernels();
  at::parallel_for(0, call.linear.M, 16, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) scales.mutable_data_ptr<float>()[m] = table.activation_row(call, m, codes.mutable_data_ptr<float>() + m * call.linear.K);
  });
  return {codes, scales};
}

// A library may sum pairs of products in 16 bits, where they do not fit (measured: on processors without VNNI). One product
// of the largest codes shows it.
bool library_sums_exactly() {
  static const bool exact = [] {
    auto low = at::full({16, 64}, -128, at::kChar), high = at::full({16, 64}, 127, at::kChar);
    return at::_int_mm(low, low.t()).eq(128 * 128 * 64).all().item<bool>() && at::_int_mm(low, high.t()).eq(-128 * 127 * 64).all().item<bool>();
  }();
  return exact;
}

void integers_by_library(const at::Tensor& x, const std::vector<Part>& parts, const Form& form, float input_scale, std::vector<at::Tensor>& out) {
  auto [codes, scales] = activation_codes(call_of(x, parts[0], form, input_scale, out[0]));
  auto rows = codes.to(at::kChar);
  for (size_t i = 0; i < parts.size(); i++) {
    auto sums = at::_int_mm(rows, parts[i].codes.view(at::kChar).narrow(1, 0, x.size(1)).t());
    QuantizedCall call = call_of(x, parts[i], form, input_scale, out[i]);
    at::parallel_for(0, call.linear.M, 16, [&](int64_t begin, int64_t end) {
      kernels().finish_integers(call, sums.const_data_ptr<int32_t>() + begin * call.linear.N, call.linear.N, scales.const_data_ptr<float>(), begin, end - begin, 0, call.linear.N);
    });
  }
}

void plain_rows(const Part& part, const Form& form, int64_t K, int64_t begin, int64_t end, at::Tensor& out) {
  QuantizedWeight weight = weight_of(part, form);
  DType type = kernel_type(out.scalar_type());
  int64_t row_bytes = K * out.element_size();
  at::parallel_for(begin, end, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, weight.code_stride)), [&](int64_t first, int64_t last) {
    auto buffer = (float*)scratch(kScratchPartial, rounded_up(K, 32) * sizeof(float));
    kernels().quantized_rows(weight, K, first, last, buffer, (char*)out.data_ptr() + (first - begin) * row_bytes, type);
  });
}

// A whole chunk: library products over plain weights, in the rows' own type where the machine multiplies it fast.
void by_tile(const at::Tensor& x, const std::vector<Part>& parts, const Form& form, float input_scale, std::vector<at::Tensor>& out) {
  at::Tensor rows = x;
  if (form.activations != Activations::none) {
    auto [codes, scales] = activation_codes(call_of(x, parts[0], form, input_scale, out[0]));
    rows = codes.mul_(scales.unsqueeze(1)).to(x.scalar_type());
  }
  bool library = x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && kernels().hardware_bf16);
  auto type = library ? x.scalar_type() : at::kFloat;
  // Libraries may choose other code for other alignments: every chunk starts on a cache line.
  bool aligned = rows.is_contiguous() && rows.scalar_type() == type && reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 64 == 0;
  if (!aligned) rows = rows.to(type).clone(at::MemoryFormat::Contiguous);
  int64_t K = x.size(1), row_bytes = K * int64_t(at::elementSize(type));
  int64_t tile = std::max<int64_t>(64, kPlainTileBytes / std::max<int64_t>(1, row_bytes) / 64 * 64);
  for (size_t i = 0; i < parts.size(); i++) {
    int64_t N = parts[i].codes.size(0);
    auto plain = at::empty({std::min(tile, N), K}, at::TensorOptions(type));
    for (int64_t n = 0; n < N; n += tile) {
      int64_t width = std::min(tile, N - n);
      auto some = plain.narrow(0, 0, width);
      plain_rows(parts[i], form, K, n, n + width, some);
      out[i].narrow(1, n, width).copy_(at::linear(rows, some, parts[i].bias ? std::optional<at::Tensor>(parts[i].bias->narrow(0, n, width).to(type)) : std::nullopt));
    }
  }
}

std::vector<at::Tensor> quantized_linears(const at::Tensor& x, std::vector<Part> parts, const std::optional<at::Tensor>& input_scale, int64_t handle, const Form& form) {
  at::AutoDispatchBelowAutograd below_autograd;
  TORCH_CHECK(x.dim() >= 1 && is_kernel_type(x.scalar_type()), "dayzero::quantized_linear: x must be float32, bfloat16 or float16");
  int64_t K = x.size(-1);
  auto x_rows = x.dim() == 2 ? x : x.reshape({-1, K});
  x_rows = x_rows.stride(-1) == 1 || K <= 1 ? x_rows : x_rows.contiguous();
  std::vector<at::Tensor> out;
  std::vector<std::vector<int64_t>> shapes;
  for (Part& part : parts) {
    part = checked_part(part, K, form);
    shapes.push_back(x.sizes().vec());
    shapes.back().back() = part.codes.size(0);
    out.push_back(at::empty({x_rows.size(0), part.codes.size(0)}, x.options()));
  }
  auto finished = [&] {
    for (size_t i = 0; i < parts.size(); i++) out[i] = out[i].view(shapes[i]);
    return out;
  };
  int64_t num_rows = x_rows.size(0), few = kFewRows;
  if (num_rows == 0 || K == 0 || parts.empty()) {
    for (size_t i = 0; i < parts.size(); i++) { out[i].zero_(); if (parts[i].bias) out[i].add_(*parts[i].bias); }
    return finished();
  }
  float given_scale = input_scale ? input_scale->item<float>() : 0.0f;
  bool integers = kernels().sums_integers(call_of(x_rows, parts[0], form, given_scale, out[0]));
  if (integers) {                                                  // exact sums: no row depends on another
    if (num_rows >= kLibraryIntegerRows && library_sums_exactly()) integers_by_library(x_rows, parts, form, given_scale, out);
    else by_row(kernels(), x_rows, parts, form, given_scale, out);
    return finished();
  }
  std::shared_ptr<StepState> state = handle >= 0 ? states().at(handle) : nullptr;
  std::vector<Segment> whole;
  const std::vector<Segment>* segments = &whole;
  if (state && num_rows == state->step.num_tokens) segments = &state->step.segments;
  else whole.push_back({0, num_rows, num_rows <= (state ? std::max(few, state->step.num_sequences) : few)});
  for (const Segment& segment : *segments) {
    auto rows = x_rows.narrow(0, segment.begin, segment.end - segment.begin);
    std::vector<at::Tensor> targets;
    for (auto& one : out) targets.push_back(one.narrow(0, segment.begin, segment.end - segment.begin));
    // Without an engine nothing is promised about company: the kernels that are fastest for this many rows.
    bool tiles = (state ? state->max_rows : segment.end - segment.begin) > kRowsInRegisters;
    if (segment.by_row) by_row(tiles ? kernels() : few_row_kernels(), rows, parts, form, given_scale, targets);
    else by_tile(rows, parts, form, given_scale, targets);
  }
  return finished();
}

at::Tensor quantized_linear_at(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& zeros,
                               const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& input_scale, const at::Tensor& site,
                               int64_t code, int64_t block_rows, int64_t block_columns, int64_t activations) {
  Form form = checked_form(code, block_rows, block_columns, activations);
  return quantized_linears(x, {{codes, scales, zeros, bias}}, input_scale, site.const_data_ptr<int64_t>()[0], form)[0];
}

std::vector<at::Tensor> quantized_linears_at(const at::Tensor& x, at::TensorList codes, at::TensorList scales, const c10::List<std::optional<at::Tensor>>& zeros,
                                             const c10::List<std::optional<at::Tensor>>& biases, const at::Tensor& site, int64_t code, int64_t block_rows,
                                             int64_t block_columns, int64_t activations) {
  TORCH_CHECK(codes.size() == scales.size() && codes.size() == zeros.size() && codes.size() == biases.size(), "dayzero::quantized_linears_at: parts of ", codes.size(), " weights");
  auto given = [](const std::optional<at::Tensor>& one) { return one && one->defined() ? one : std::nullopt; };
  std::vector<Part> parts;
  for (size_t i = 0; i < codes.size(); i++) parts.push_back({codes[i], scales[i], given(zeros.get(i)), given(biases.get(i))});
  return quantized_linears(x, std::move(parts), std::nullopt, site.const_data_ptr<int64_t>()[0], checked_form(code, block_rows, block_columns, activations));
}

at::Tensor dequantized(const at::Tensor& codes, const at::Tensor& scales, const std::optional<at::Tensor>& zeros, int64_t columns, int64_t code,
                       int64_t block_rows, int64_t block_columns, at::ScalarType dtype) {
  Form form = checked_form(code, block_rows, block_columns, 0);
  Part part = checked_part({codes, scales, zeros, std::nullopt}, columns, form);
  auto out = at::empty({codes.size(0), columns}, at::TensorOptions(dtype));
  if (out.numel()) plain_rows(part, form, columns, 0, codes.size(0), out);
  return out;
}

}  // namespace
}  // namespace dayzero

TORCH_LIBRARY_IMPL(dayzero, CPU, m) {
  m.impl("quantized_linear_at", dayzero::quantized_linear_at);
  m.impl("quantized_linears_at", dayzero::quantized_linears_at);
  m.impl("dequantized", dayzero::dequantized);
}
