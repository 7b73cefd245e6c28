// The operators that carry no tensors of the model: instruction set, engine state, pools, and the step about to run.
#include <cstdlib>
#include <torch/library.h>
#include "state.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dayzero {

States& states() { static States* all = new States; return *all; }

bool is_kernel_type(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }
DType kernel_type(at::ScalarType type) {
  TORCH_CHECK(is_kernel_type(type), "dayzero: expected float32, bfloat16 or float16, got ", type);
  return type == at::kFloat ? DType::f32 : type == at::kBFloat16 ? DType::bf16 : DType::f16;
}

char* scratch(ScratchSlot slot, size_t num_bytes) {
  struct Buffer {
    char* data = nullptr; size_t size = 0;
    ~Buffer() { std::free(data); }
  };
  static thread_local Buffer buffers[kNumScratch];
  Buffer& buffer = buffers[slot];
  if (buffer.size < num_bytes) {
    std::free(buffer.data);
    buffer.size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = (char*)std::aligned_alloc(64, buffer.size);
    TORCH_CHECK(buffer.data, "dayzero: no memory for ", buffer.size, " bytes of scratch");
  }
  return buffer.data;
}

namespace {

#if defined(__x86_64__)
bool cpu_has_bf16() { unsigned a, b, c, d; return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1); }
bool cpu_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;   // Linux gives tiles on request
#else
  return false;
#endif
}
#endif

// Usable here, best first: compiled in, present in the processor, and enabled by the operating system.
std::vector<const KernelTable*> find_tables() {
  std::vector<const KernelTable*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  bool with_bf16 = avx512 && cpu_has_bf16();
  if (dayzero_kernels_amx_bf16 && with_bf16 && cpu_has_amx()) found.push_back(dayzero_kernels_amx_bf16());
  if (dayzero_kernels_avx512_bf16 && with_bf16) found.push_back(dayzero_kernels_avx512_bf16());
  if (dayzero_kernels_avx512 && avx512) found.push_back(dayzero_kernels_avx512());
  if (dayzero_kernels_avx2 && avx2) found.push_back(dayzero_kernels_avx2());
#endif
  found.push_back(dayzero_kernels_generic());
  return found;
}

const std::vector<const KernelTable*>& tables() { static const auto found = find_tables(); return found; }
const KernelTable*& in_use() { static const KernelTable* table = tables()[0]; return table; }

std::string isa() { return in_use()->isa; }
std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (auto table : tables()) names.push_back(table->isa);
  return names;
}
void set_isa(std::string name) {
  for (auto table : tables()) if (name == table->isa) { in_use() = table; return; }
  std::string known;
  for (auto table : tables()) known += std::string(known.empty() ? "" : ", ") + table->isa;
  TORCH_CHECK(false, "dayzero: instruction set ", name, " is not usable here; usable: ", known);
}

int64_t create_state() { return states().create(); }
void destroy_state(int64_t handle) { states().destroy(handle); }
void set_max_rows(int64_t handle, int64_t max_rows) { states().at(handle)->max_rows = max_rows; }

void set_pool(int64_t handle, int64_t layer, const at::Tensor& k, const at::Tensor& v, int64_t block_size, int64_t window, int64_t chunk) {
  TORCH_CHECK(k.dim() == 4 && v.dim() == 4 && k.scalar_type() == v.scalar_type(), "dayzero: pools must be [num_blocks, block_size, Hkv, D] of one dtype");
  TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1 && k.device().is_cpu() && v.device().is_cpu(), "dayzero: pools must be on the CPU with a dense last dimension");
  TORCH_CHECK(k.size(0) == v.size(0) && k.size(2) == v.size(2) && k.size(1) == block_size && v.size(1) == block_size, "dayzero: pools ", k.sizes(), " and ", v.sizes(), " do not agree on blocks of ", block_size);
  TORCH_CHECK(block_size > 0 && window >= 0 && chunk >= 0, "dayzero: block_size must be positive, window and chunk not negative");
  states().at(handle)->pools[layer] = Pool{k, v, kernel_type(k.scalar_type()), block_size, window, chunk};
}

std::vector<int32_t> integers(const at::Tensor& t) {
  TORCH_CHECK(t.scalar_type() == at::kInt && t.device().is_cpu(), "dayzero: a step is described by int32 CPU tensors");
  auto dense = t.contiguous();
  auto data = dense.const_data_ptr<int32_t>();
  return std::vector<int32_t>(data, data + dense.numel());
}

void begin_step(int64_t handle, const at::Tensor& query_offsets, const at::Tensor& context_lens, const at::Tensor& block_tables, int64_t num_decode) {
  auto state = states().at(handle);
  TORCH_CHECK(context_lens.dim() == 1 && query_offsets.numel() == context_lens.numel() + 1 && block_tables.dim() == 2 && block_tables.size(0) == context_lens.numel(),
              "dayzero: begin_step wants query_offsets [S+1], context_lens [S], block_tables [S, max_blocks]; got ", query_offsets.sizes(), context_lens.sizes(), block_tables.sizes());
  Step step;
  step.offsets = integers(query_offsets); step.context = integers(context_lens); step.tables = integers(block_tables);
  step.num_sequences = context_lens.numel(); step.max_blocks = block_tables.size(1); step.num_decode = num_decode;
  step.num_tokens = step.offsets.back();
  TORCH_CHECK(num_decode >= 0 && num_decode <= step.num_sequences && step.offsets[0] == 0, "dayzero: query_offsets must start at 0 and num_decode be at most ", step.num_sequences);
  for (int64_t s = 0; s < step.num_sequences; s++) {
    int64_t n = step.length(s), begin = step.offsets[s];
    TORCH_CHECK(n >= 0 && step.context[s] >= n && (s >= num_decode || n == 1), "dayzero: sequence ", s, " of ", num_decode, " decoding has ", n, " new tokens and context ", step.context[s]);
    if (n == 0) continue;
    bool by_row = s < num_decode || n <= kShortSegment;
    if (by_row && !step.segments.empty() && step.segments.back().by_row) step.segments.back().end = begin + n;
    else step.segments.push_back({begin, begin + n, by_row});
    if (!by_row) step.chunks.push_back(s);
    else for (int64_t i = 0; i < n; i++) step.rows.push_back({begin + i, s, step.first_position(s) + i});
  }
  state->step = std::move(step);
}

}  // namespace

const KernelTable& kernels() { return *in_use(); }

const KernelTable& row_kernels(const StepState* state) {
  return state && state->max_rows <= kFewRowsEngine ? few_row_kernels() : *in_use();
}

const KernelTable& few_row_kernels() {
  const KernelTable* table = in_use();
  if (std::string(table->isa) != "amx_bf16") return *table;
  for (auto other : tables()) if (std::string(other->isa) == "avx512_bf16") return *other;
  return *table;
}

}  // namespace dayzero

// A fragment: Python code may define further operators of the namespace.
TORCH_LIBRARY_FRAGMENT(dayzero, m) {
  using namespace dayzero;
  m.def("isa() -> str", isa);
  m.def("available_isas() -> str[]", available_isas);
  m.def("set_isa(str name) -> ()", set_isa);
  m.def("create_state() -> int", create_state);
  m.def("destroy_state(int handle) -> ()", destroy_state);
  m.def("set_max_rows(int handle, int max_rows) -> ()", set_max_rows);
  m.def("set_pool(int handle, int layer, Tensor k_pool, Tensor v_pool, int block_size, int window, int chunk) -> ()", set_pool);
  m.def("begin_step(int handle, Tensor query_offsets, Tensor context_lens, Tensor block_tables, int num_decode) -> ()", begin_step);
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, int handle) -> Tensor");
  m.def("paged_attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int handle, int layer, float scale, float softcap) -> Tensor");
  m.def("linear_at(Tensor x, Tensor weight, Tensor? bias, Tensor site) -> Tensor");
  m.def("linears_at(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor site) -> Tensor[]");
  m.def("paged_attention_at(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor site, float scale, float softcap) -> Tensor");
  m.def("quantized_linear_at(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? bias, Tensor? input_scale, Tensor site, int code, int block_rows, int block_columns, int activations) -> Tensor");
  m.def("quantized_linears_at(Tensor x, Tensor[] codes, Tensor[] scales, Tensor?[] zeros, Tensor?[] biases, Tensor site, int code, int block_rows, int block_columns, int activations) -> Tensor[]");
  m.def("dequantized(Tensor codes, Tensor scales, Tensor? zeros, int columns, int code, int block_rows, int block_columns, ScalarType dtype) -> Tensor");
  m.def("block_range(Tensor x, int width) -> (Tensor, Tensor)");
  m.def("integer_codes(Tensor x, Tensor scales, Tensor? zeros, int width, int bits, bool packed) -> (Tensor, Tensor)");
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset) -> Tensor");
}
