// dayzero::linear and dayzero::rms_norm. Rows that decode go through the row kernels, each prefill chunk through one
// library call of its own, so that a sequence's rows are the same bits whatever else is in the step.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include "state.h"

namespace dayzero {
namespace {

// Rows of unknown origin (logits, no step): up to this many are treated as decoding.
constexpr int64_t kFewRows = 64;
// Below this much weight a second thread costs more than it brings.
constexpr int64_t kGrainBytes = 48 * 1024;
// Widened weights are made and multiplied a tile at a time; a tile should stay in a level-3 cache.
constexpr int64_t kWidenedTileBytes = 4 << 20;

at::Tensor dense_rows(const at::Tensor& t) { return t.stride(-1) == 1 || t.size(-1) <= 1 ? t : t.contiguous(); }

struct Weights { at::Tensor weight; std::optional<at::Tensor> bias; };

// Several weights over the same rows as one parallel region: a region costs as much as reading a small weight.
void linear_by_row(const KernelTable& table, const at::Tensor& x, const std::vector<Weights>& all, std::vector<at::Tensor>& out) {
  struct Part { LinearCall call; void* packed; int64_t first_unit; };
  std::vector<Part> parts;
  int64_t units = 0, widest = 1;
  for (size_t i = 0; i < all.size(); i++) {
    const at::Tensor& weight = all[i].weight;
    const auto& bias = all[i].bias;
    LinearCall call{x.const_data_ptr(), x.stride(0), kernel_type(x.scalar_type()), weight.const_data_ptr(), weight.stride(0), kernel_type(weight.scalar_type()),
                    bias ? bias->const_data_ptr() : nullptr, bias ? kernel_type(bias->scalar_type()) : DType::f32,
                    out[i].data_ptr(), out[i].stride(0), x.size(0), weight.size(0), x.size(1)};
    // Rows are packed for a type of weight, not for a weight: parts of one type share the packing.
    void* packed = nullptr;
    if (i > 0 && call.w_type == parts[0].call.w_type) packed = parts[0].packed;
    else if (size_t pack_bytes = table.linear_pack_bytes(call)) {
      TORCH_CHECK(i == 0, "dayzero::linears_at: weights must be of one dtype");
      packed = scratch(kScratchPack, pack_bytes);
      table.linear_pack(call, packed);
    }
    parts.push_back({call, packed, units});
    units += (call.N + kColumnUnit - 1) / kColumnUnit;
    widest = std::max<int64_t>(widest, kColumnUnit * call.K * weight.element_size());
  }
  at::parallel_for(0, units, std::max<int64_t>(1, kGrainBytes / widest), [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < parts.size(); i++) {
      const Part& part = parts[i];
      int64_t part_units = (part.call.N + kColumnUnit - 1) / kColumnUnit;
      int64_t first = std::max<int64_t>(begin - part.first_unit, 0), last = std::min(end - part.first_unit, part_units);
      if (first < last) table.linear_columns(part.call, part.packed, first * kColumnUnit, std::min(last * kColumnUnit, part.call.N));
    }
  });
}

// float32 matmul over weights widened tile by tile, for types the machine multiplies slowly.
at::Tensor linear_widened(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  auto out = at::empty({x.size(0), weight.size(0)}, x.options());
  auto x_f32 = x.to(at::kFloat).contiguous();
  int64_t N = weight.size(0), tile = std::max<int64_t>(64, kWidenedTileBytes / (4 * std::max<int64_t>(1, weight.size(1))) / 64 * 64);
  for (int64_t n = 0; n < N; n += tile) {
    int64_t width = std::min(tile, N - n);
    auto product = at::mm(x_f32, weight.narrow(0, n, width).to(at::kFloat).t());
    if (bias) product.add_(bias->narrow(0, n, width));
    out.narrow(1, n, width).copy_(product);
  }
  return out;
}

at::Tensor linear_chunk(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  bool library = x.scalar_type() == weight.scalar_type() && (x.scalar_type() == at::kFloat || (x.scalar_type() == at::kBFloat16 && kernels().hardware_bf16));
  if (!library) return linear_widened(x, weight, bias);
  // Libraries may choose other code for other alignments: every chunk starts on a cache line.
  bool aligned = x.is_contiguous() && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 64 == 0;
  return at::linear(aligned ? x : x.clone(at::MemoryFormat::Contiguous), weight, bias);
}

std::vector<at::Tensor> linears(const at::Tensor& x, std::vector<Weights> all, int64_t handle) {
  at::AutoDispatchBelowAutograd below_autograd;
  std::vector<std::vector<int64_t>> shapes;
  bool ours = is_kernel_type(x.scalar_type());
  for (auto& [weight, bias] : all) {
    TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), "dayzero::linear: x ", x.sizes(), " does not fit weight ", weight.sizes());
    TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)), "dayzero::linear: bias must be [", weight.size(0), "]");
    shapes.push_back(x.sizes().vec());
    shapes.back().back() = weight.size(0);
    ours = ours && is_kernel_type(weight.scalar_type()) && weight.scalar_type() == all[0].weight.scalar_type();
    if (bias) bias = bias->contiguous();
  }
  auto x_rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
  std::vector<at::Tensor> out;
  for (auto& [weight, bias] : all) out.push_back(at::empty({x_rows.size(0), weight.size(0)}, x.options()));
  auto finished = [&] {
    for (size_t i = 0; i < all.size(); i++) out[i] = out[i].view(shapes[i]);
    return out;
  };
  if (x_rows.size(0) == 0) return finished();
  if (!ours) {                                                       // float64 references, mixed weights: a call per row
    for (size_t i = 0; i < all.size(); i++)
      for (int64_t r = 0; r < x_rows.size(0); r++) out[i].narrow(0, r, 1).copy_(at::linear(x_rows.narrow(0, r, 1), all[i].weight, all[i].bias));
    return finished();
  }
  x_rows = dense_rows(x_rows);
  for (auto& [weight, bias] : all) weight = dense_rows(weight);
  int64_t num_rows = x_rows.size(0), few = kFewRows;
  std::shared_ptr<StepState> state = handle >= 0 ? states().at(handle) : nullptr;
  std::vector<Segment> whole;
  const std::vector<Segment>* segments = &whole;
  if (state && num_rows == state->step.num_tokens) segments = &state->step.segments;
  else {
    if (state) few = std::max(few, state->step.num_sequences);       // one logits row per sequence
    whole.push_back({0, num_rows, num_rows <= few});
  }
  if (segments->size() == 1 && !segments->front().by_row) {
    for (size_t i = 0; i < all.size(); i++) out[i] = linear_chunk(x_rows, all[i].weight, all[i].bias);
    return finished();
  }
  for (const Segment& segment : *segments) {
    auto rows = x_rows.narrow(0, segment.begin, segment.end - segment.begin);
    std::vector<at::Tensor> targets;
    for (auto& one : out) targets.push_back(one.narrow(0, segment.begin, segment.end - segment.begin));
    if (segment.by_row) linear_by_row(row_kernels(state.get()), rows, all, targets);
    else for (size_t i = 0; i < all.size(); i++) targets[i].copy_(linear_chunk(rows, all[i].weight, all[i].bias));
  }
  return finished();
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t handle) {
  return linears(x, {{weight, bias}}, handle)[0];
}

std::vector<at::Tensor> linears_at(const at::Tensor& x, at::TensorList weights, const c10::List<std::optional<at::Tensor>>& biases, const at::Tensor& site) {
  TORCH_CHECK(weights.size() == biases.size(), "dayzero::linears_at: ", weights.size(), " weights and ", biases.size(), " biases");
  std::vector<Weights> all;
  for (size_t i = 0; i < weights.size(); i++) {
    std::optional<at::Tensor> bias = biases.get(i);
    all.push_back({weights[i], bias && bias->defined() ? bias : std::nullopt});
  }
  return linears(x, std::move(all), site.const_data_ptr<int64_t>()[0]);
}

// As `linear`, with the handle in a tensor: a compiled graph takes it as an input and so serves any engine.
at::Tensor linear_at(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, const at::Tensor& site) {
  return linear(x, weight, bias, site.const_data_ptr<int64_t>()[0]);
}

at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight_in, double eps, double weight_offset) {
  at::AutoDispatchBelowAutograd below_autograd;
  auto x_dense = x.contiguous();
  auto out = at::empty_like(x_dense);
  int64_t n = x.size(-1);
  if (out.numel() == 0) return out;
  auto weight = weight_in ? std::optional<at::Tensor>(weight_in->contiguous()) : std::nullopt;
  TORCH_CHECK(!weight || weight->numel() == n, "dayzero::rms_norm: weight must be [", n, "]");
  const KernelTable& table = kernels();
  NormRow all{x_dense.const_data_ptr(), out.data_ptr(), kernel_type(x.scalar_type()), weight ? weight->const_data_ptr() : nullptr,
              weight ? kernel_type(weight->scalar_type()) : DType::f32, n, float(eps), float(weight_offset)};
  int64_t row_bytes = n * x.element_size();
  at::parallel_for(0, x.numel() / n, std::max<int64_t>(1, 16384 / n), [&](int64_t begin, int64_t end) {
    NormRow row = all;
    for (int64_t i = begin; i < end; i++) {
      row.x = (const char*)all.x + i * row_bytes;
      row.out = (char*)all.out + i * row_bytes;
      table.norm_row(row);
    }
  });
  return out;
}

}  // namespace
}  // namespace dayzero

TORCH_LIBRARY_IMPL(dayzero, CPU, m) {
  m.impl("linear", dayzero::linear);
  m.impl("linear_at", dayzero::linear_at);
  m.impl("linears_at", dayzero::linears_at);
  m.impl("rms_norm", dayzero::rms_norm);
}
