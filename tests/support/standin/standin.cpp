// A second kind of device for PyTorch, in main memory: two accelerators whose operators run on the processor.
//
// It shows what a processor cannot: where a program waits for its device, where it mixes devices, and what it does
// when memory runs out, a kernel hangs, or a device is lost. Everything is computed at once, but copies to pinned
// memory arrive only when the host waits for them, so a read that comes too early finds the old numbers.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

constexpr auto kStandin = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// ---------------------------------------------------------------- state

struct Device {
  std::atomic<int64_t> allocated{0}, peak{0}, limit{int64_t(1) << 34};
  std::atomic<bool> is_lost{false}, hangs{false}, has_float64{true};
};

Device devices[kDevices];
std::atomic<int64_t> waits{0}, fallbacks{0};
thread_local int64_t waits_here = 0;
thread_local c10::DeviceIndex current = 0;

void require_present(c10::DeviceIndex index) {
  TORCH_CHECK(!devices[index].is_lost, "standin error: device ", int(index), " is lost");
}

struct Copy {
  int64_t number;
  Tensor from, to;
};

std::mutex copies_lock;
std::deque<Copy> copies;
std::atomic<int64_t> queued{0};

void finish_copies(int64_t until) {
  std::lock_guard<std::mutex> hold(copies_lock);
  while (!copies.empty() && copies.front().number <= until) {
    copies.front().to.copy_(copies.front().from);
    copies.pop_front();
  }
}

// The host waits for a device.
void wait_for(c10::DeviceIndex index, int64_t until) {
  ++waits;
  ++waits_here;
  while (devices[index].hangs && !devices[index].is_lost) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  require_present(index);
  finish_copies(until);
}

// ---------------------------------------------------------------- memory

struct Block {
  void* pointer;
  c10::DeviceIndex device;
  int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  devices[block->device].allocated -= block->bytes;
  c10::free_cpu(block->pointer);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto& device = devices[current];
    require_present(current);
    const c10::Device place(kStandin, current);
    if (bytes == 0) return {nullptr, place};
    const int64_t after = device.allocated += int64_t(bytes);
    if (after > device.limit) {
      device.allocated -= int64_t(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", bytes, " bytes");
    }
    int64_t peak = device.peak;
    while (after > peak && !device.peak.compare_exchange_weak(peak, after)) {
    }
    void* pointer = c10::alloc_cpu(bytes);
    return {pointer, new Block{pointer, current, int64_t(bytes)}, &release, place};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const size_t all = size_t(c10::CachingAllocator::StatType::AGGREGATE);
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*bytes)[all].current = devices[index].allocated;
      (*bytes)[all].peak = devices[index].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override { devices[index].peak = devices[index].allocated.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const int64_t limit = devices[index].limit;
    return {size_t(std::max<int64_t>(0, limit - devices[index].allocated)), size_t(limit)};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kStandin, &allocator);

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void release_pinned(void* pointer) {
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned.erase(static_cast<const char*>(pointer));
  }
  c10::free_cpu(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = c10::alloc_cpu(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[static_cast<const char*>(pointer)] = std::max<size_t>(bytes, 1);
    return {pointer, pointer, &release_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  const auto* pointer = static_cast<const char*>(data);
  auto after = pinned.upper_bound(pointer);
  if (after == pinned.begin()) return false;
  --after;
  return pointer < after->first + after->second;
}

// ---------------------------------------------------------------- random numbers

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kStandin, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        on_cpu(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "standin generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "standin generators have no offset"); }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->on_cpu = on_cpu.clone();
    return copy;
  }
  at::Generator on_cpu;
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static at::Generator generators[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators[index < 0 ? current : index];
}

// ---------------------------------------------------------------- devices, events

struct Mark {
  Clock::time_point time;
  int64_t copies;
  c10::DeviceIndex device;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kStandin; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kStandin, current);
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {kStandin, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "standin error: invalid device ordinal");
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kStandin, device.has_index() ? device.index() : current});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream& stream) const override { return !devices[stream.device_index()].hangs; }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream.device_index(), queued); }
  void synchronizeDevice(c10::DeviceIndex index) const override { wait_for(index, queued); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    delete static_cast<Mark*>(*event);
    *event = new Mark{Clock::now(), queued, stream.device_index()};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto* mark = static_cast<Mark*>(event);
    if (devices[mark->device].hangs) return false;
    finish_copies(mark->copies);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto* mark = static_cast<Mark*>(event);
    wait_for(mark->device, mark->copies);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto span = static_cast<Mark*>(second)->time - static_cast<Mark*>(first)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::Device before(kStandin, std::exchange(current, storage.device().index()));
    auto memory = allocator.allocate(bytes);
    std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    current = before.index();
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
};

const int hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 0;
}();

// ---------------------------------------------------------------- operators on the processor

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kStandin; }

// The same memory as a tensor of the processor.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  void* data = tensor.storage().mutable_data();
  if (data == nullptr) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* begin = static_cast<char*>(data) + tensor.storage_offset() * tensor.itemsize();
  return at::for_blob(begin, tensor.sizes()).strides(tensor.strides()).options(options).target_device(at::kCPU).make_tensor();
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, c10::DeviceIndex index) {
  const bool is_wide = type == at::kDouble || type == at::kComplexDouble;
  TORCH_CHECK_TYPE(
      !is_wide || devices[index].has_float64, "Cannot convert a standin Tensor to float64 dtype as device ", int(index),
      " doesn't support float64. Please use float32 instead.");
  const auto before = std::exchange(current, index);
  struct Restore {
    c10::DeviceIndex before;
    ~Restore() { current = before; }
  } restore{before};
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys, type);
}

Tensor to_device(const Tensor& made, c10::DeviceIndex index) {
  if (!made.defined() || is_here(made)) return made;
  auto copy = empty_strided(made.sizes(), made.strides(), made.scalar_type(), index);
  if (made.numel() > 0) on_cpu(copy).copy_(made);
  return copy;
}

const std::unordered_set<std::string> kTakesCpuTensors = {
    "aten::index",       "aten::index_put_",           "aten::_index_put_impl_", "aten::_pack_padded_sequence",
    "aten::index_put",   "aten::_unsafe_index",        "aten::_unsafe_index_put"};
const std::unordered_set<std::string> kSizesDependOnValues = {
    "aten::nonzero",          "aten::masked_select",      "aten::_unique2",     "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::equal",        "aten::is_nonzero"};

struct Arguments {
  std::string name;
  std::optional<c10::Device> device;
  bool reads_values = false;

  void meet(const Tensor& tensor) {
    if (!tensor.defined() || (!is_here(tensor) && (tensor.dim() == 0 || kTakesCpuTensors.count(name)))) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(
        *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
        *device, " and ", tensor.device(), "! (", name, ")");
  }
};

struct Written {
  Tensor original, view;
};

// Operators that draw numbers and take no generator, such as dropout, draw from the processor's: lend it the device's.
class LentGenerator {
 public:
  LentGenerator(c10::DeviceIndex index, bool is_lent)
      : own(static_cast<Generator*>(default_generator(index).unsafeGetGeneratorImpl())->on_cpu), is_lent(is_lent) {
    if (!is_lent) return;
    before = cpu.get_state();
    cpu.set_state(own.get_state());
  }
  ~LentGenerator() {
    if (!is_lent) return;
    own.set_state(cpu.get_state());
    cpu.set_state(before);
  }

 private:
  at::Generator cpu = at::detail::getDefaultCPUGenerator(), own;
  bool is_lent;
  Tensor before;
};

void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++fallbacks;
  const auto& schema = op.schema();
  const auto& expected = schema.arguments();
  const size_t base = stack->size() - expected.size();
  Arguments arguments{schema.name(), std::nullopt, kSizesDependOnValues.count(schema.name()) > 0};
  std::optional<c10::Device> wanted;
  std::vector<Tensor> originals;
  std::vector<Written> written;

  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& value = (*stack)[base + i];
    if (value.isTensor()) {
      arguments.meet(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& one : value.toTensorVector()) arguments.meet(one);
    } else if (value.isDevice()) {
      wanted = value.toDevice();
    }
  }
  c10::DeviceIndex index = current;
  if (arguments.device && arguments.device->type() == kStandin) index = arguments.device->index();
  if (wanted && wanted->type() == kStandin && wanted->has_index()) index = wanted->index();
  require_present(index);

  auto view = [&](const Tensor& original, const c10::Argument& argument) {
    Tensor made = on_cpu(original);
    if (is_here(original)) {
      originals.push_back(original);
      const auto* alias = argument.alias_info();
      if (alias != nullptr && alias->isWrite()) written.push_back({original, made});
    }
    return made;
  };
  for (size_t i = 0; i < expected.size(); ++i) {
    auto& value = (*stack)[base + i];
    const auto& argument = expected[i];
    if (value.isTensor()) {
      value = c10::IValue(view(value.toTensor(), argument));
    } else if (value.isTensorList()) {
      std::vector<Tensor> views;
      for (const Tensor& one : value.toTensorVector()) views.push_back(view(one, argument));
      value = c10::IValue(views);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor>& one : value.toOptionalTensorVector()) {
        if (!one || !one->defined()) {
          views.push_back(std::nullopt);
          continue;
        }
        arguments.reads_values |= one->scalar_type() == at::kBool || one->scalar_type() == at::kByte;
        views.push_back(view(*one, argument));
      }
      value = c10::IValue(views);
    } else if (value.isDevice()) {
      value = c10::IValue(c10::Device(at::kCPU));
    } else if (value.isGenerator()) {
      auto* own = dynamic_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
      TORCH_CHECK(own != nullptr, "Expected a 'standin' device type for generator but found 'cpu'");
      value = c10::IValue(own->on_cpu);
    } else if (value.isNone() && argument.type()->str() == "Generator?") {
      auto* own = static_cast<Generator*>(default_generator(index).unsafeGetGeneratorImpl());
      value = c10::IValue(own->on_cpu);
    }
  }
  if (arguments.reads_values) wait_for(index, queued);

  {
    const bool takes_none = std::none_of(expected.begin(), expected.end(), [](const c10::Argument& argument) {
      return argument.type()->str() == "Generator?";
    });
    LentGenerator lent(index, takes_none && op.hasTag(at::Tag::nondeterministic_seeded));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  for (auto& one : written) {
    if (one.view.sizes() != one.original.sizes()) {
      one.original.resize_(one.view.sizes());
      on_cpu(one.original).copy_(one.view);
    }
  }
  const auto& returned = schema.returns();
  const size_t first = stack->size() - returned.size();
  auto restored = [&](const Tensor& made, const c10::AliasInfo* alias) {
    for (auto& one : written) {
      if (one.view.is_same(made)) return one.original;
    }
    if (alias != nullptr && !alias->isWrite() && made.defined() && made.numel() > 0) {
      for (const Tensor& one : originals) {
        if (on_cpu(one).storage().data() == made.storage().data()) {
          return at::as_strided(one, made.sizes(), made.strides(), one.storage_offset() + made.storage_offset());
        }
      }
    }
    return to_device(made, index);
  };
  for (size_t i = 0; i < returned.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = c10::IValue(restored(value.toTensor(), returned[i].alias_info()));
    } else if (value.isTensorList()) {
      std::vector<Tensor> made;
      for (const Tensor& one : value.toTensorVector()) made.push_back(restored(one, returned[i].alias_info()));
      value = c10::IValue(made);
    }
  }
}

// ---------------------------------------------------------------- operators of its own

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return device && device->has_index() ? device->index() : current;
}

Tensor empty_memory_format(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto index = index_of(device);
  auto made = empty_strided(
      sizes, c10::contiguous_strides(sizes), c10::dtype_or_default(type), index);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous) {
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return made;
}

Tensor empty_with_strides(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided(sizes, strides, c10::dtype_or_default(type), index_of(device));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  for (const Tensor* one : {&from, &to}) {
    if (is_here(*one)) require_present(one->device().index());
  }
  if (is_here(from) && is_here(to)) {
    on_cpu(to).copy_(on_cpu(from));
  } else if (is_here(to)) {
    if (!non_blocking) wait_for(to.device().index(), queued);
    on_cpu(to).copy_(from);
  } else if (non_blocking && is_pinned(to.storage().data())) {
    std::lock_guard<std::mutex> hold(copies_lock);
    copies.push_back({++queued, on_cpu(from).clone(), to});
  } else {
    wait_for(from.device().index(), queued);
    to.copy_(on_cpu(from));
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  wait_for(tensor.device().index(), queued);
  return at::_local_scalar_dense(on_cpu(tensor));
}

Tensor as_strided(
    const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const Tensor& resize_(const Tensor& tensor, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() == sizes) return tensor;
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = size_t(impl->numel() + impl->storage_offset()) * tensor.itemsize();
  const auto& storage = tensor.storage();
  if (bytes > storage.nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, bytes);
  return tensor;
}

Tensor& set_source_storage_offset(
    Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto places = C10_AS_INTARRAYREF_SLOW(sizes);
  impl->set_storage_offset(offset.expect_int());
  if (strides.empty()) {
    impl->set_sizes_contiguous(places);
  } else {
    impl->set_sizes_and_strides(places, C10_AS_INTARRAYREF_SLOW(strides));
  }
  return tensor;
}

Tensor& set_source_storage(Tensor& tensor, at::Storage storage) {
  const int64_t count = int64_t(storage.nbytes() / tensor.itemsize());
  return set_source_storage_offset(tensor, std::move(storage), 0, {c10::SymInt(count)}, {});
}

Tensor& set_source_tensor(Tensor& tensor, const Tensor& source) {
  return set_source_storage_offset(
      tensor, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

std::optional<Tensor> on_cpu(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<Tensor>(on_cpu(*tensor)) : std::nullopt;
}

void require_same_device(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(
      one.device() == other.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
      one.device(), " and ", other.device(), "!");
}

Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  require_same_device(x, weight);
  require_present(x.device().index());
  return to_device(
      at::convolution_symint(
          on_cpu(x), on_cpu(weight), on_cpu(bias), stride, padding, dilation, transposed, output_padding, groups),
      x.device().index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  require_same_device(x, weight);
  const auto index = x.device().index();
  require_present(index);
  const int64_t features = transposed ? weight.size(1) * groups.expect_int() : weight.size(0);
  std::vector<c10::SymInt> bias{c10::SymInt(features)};
  auto [of_x, of_weight, of_bias] = at::convolution_backward_symint(
      on_cpu(gradient.contiguous()), on_cpu(x), on_cpu(weight), c10::OptionalArrayRef<c10::SymInt>(bias), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  return {to_device(of_x, index), to_device(of_weight, index), to_device(of_bias, index)};
}

// Gates of recurrent cells, which PyTorch computes in one kernel on accelerators.

Tensor sum_of_gates(
    const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias_a, const std::optional<Tensor>& bias_b) {
  Tensor sum = on_cpu(a) + on_cpu(b);
  if (bias_a && bias_a->defined()) sum = sum + on_cpu(*bias_a) + on_cpu(*bias_b);
  return sum;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  const auto index = cell.device().index();
  require_present(index);
  auto gates = sum_of_gates(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), candidate = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor after = forget * on_cpu(cell) + in * candidate;
  const Tensor workspace = at::cat({in, forget, candidate, out}, 1);
  return {to_device(out * after.tanh(), index), to_device(after, index), to_device(workspace, index)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& of_hidden, const std::optional<Tensor>& of_cell, const Tensor& before, const Tensor& after,
    const Tensor& workspace, bool has_bias) {
  const auto index = before.device().index();
  const bool has_hidden = of_hidden && of_hidden->defined(), has_cell = of_cell && of_cell->defined();
  if (!has_hidden && !has_cell) return {Tensor(), Tensor(), Tensor()};
  auto gates = on_cpu(workspace).chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &candidate = gates[2], &out = gates[3];
  const Tensor squashed = on_cpu(after).tanh(), zero = at::zeros_like(squashed);
  const Tensor of_h = has_hidden ? on_cpu(*of_hidden) : zero;
  const Tensor of_c = of_h * out * (1 - squashed * squashed) + (has_cell ? on_cpu(*of_cell) : zero);
  const Tensor of_gates = at::cat(
      {of_c * candidate * in * (1 - in), of_c * on_cpu(before) * forget * (1 - forget),
       of_c * in * (1 - candidate * candidate), of_h * squashed * out * (1 - out)},
      1);
  const Tensor of_bias = has_bias ? to_device(of_gates.sum(0), index) : Tensor();
  return {to_device(of_gates, index), to_device(of_c * forget, index), of_bias};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  const auto index = hidden.device().index();
  require_present(index);
  Tensor input = on_cpu(input_gates), recurrent = on_cpu(hidden_gates);
  if (input_bias && input_bias->defined()) {
    input = input + on_cpu(*input_bias);
    recurrent = recurrent + on_cpu(*hidden_bias);
  }
  auto from = input.chunk(3, 1), to = recurrent.chunk(3, 1);
  const Tensor reset = (from[0] + to[0]).sigmoid(), update = (from[1] + to[1]).sigmoid();
  const Tensor candidate = (from[2] + reset * to[2]).tanh();
  const Tensor after = candidate + update * (on_cpu(hidden) - candidate);
  const Tensor workspace = at::cat({reset, update, candidate, on_cpu(hidden), to[2]}, 1);
  return {to_device(after, index), to_device(workspace, index)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  const auto index = gradient.device().index();
  auto parts = on_cpu(workspace).chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &candidate = parts[2], &hidden = parts[3], &recurrent = parts[4];
  const Tensor of_after = on_cpu(gradient);
  const Tensor of_candidate = of_after * (1 - update) * (1 - candidate * candidate);
  const Tensor of_reset = of_candidate * recurrent * reset * (1 - reset);
  const Tensor of_update = of_after * (hidden - candidate) * update * (1 - update);
  const Tensor of_input = at::cat({of_reset, of_update, of_candidate}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {
      to_device(of_input, index), to_device(of_hidden, index), to_device(of_after * update, index),
      has_bias ? to_device(of_input.sum(0), index) : Tensor(), has_bias ? to_device(of_hidden.sum(0), index) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_with_strides);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define IN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOWER_PRECISION)
  AT_FORALL_FP32(IN_FP32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("waits", [] { return waits.load(); });
  m.def("waits_of_thread", [] { return waits_here; });
  m.def("fallbacks", [] { return fallbacks.load(); });
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { current = c10::DeviceIndex(index); });
  m.def("synchronize", [](int index) { wait_for(c10::DeviceIndex(index), queued); }, py::call_guard<py::gil_scoped_release>());
  m.def("generator", [](int index) { return default_generator(c10::DeviceIndex(index)); });
  m.def("limit_memory", [](int index, int64_t bytes) { devices[index].limit = bytes; });
  m.def("lose", [](int index, bool is_lost) { devices[index].is_lost = is_lost; });
  m.def("narrow", [](int index, bool is_narrow) { devices[index].has_float64 = !is_narrow; });
  m.def("hang", [](int index, bool hangs) { devices[index].hangs = hangs; });
}
