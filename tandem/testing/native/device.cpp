// SPDX-License-Identifier: Apache-2.0
// A device for torch whose memory is the host's and whose kernels are the CPU's, under the dispatch
// key that is reserved for other vendors (PrivateUse1). Work is done when a call returns; streams
// and events exist and keep their identities, but nothing ever runs beside anything else.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "device.h"

namespace double_device {
namespace {

constexpr int kMaxDevices = 16;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kMaxDevices] = {};
std::atomic<int> num_devices{1};
std::atomic<c10::StreamId> last_stream{0};

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "invalid device ordinal ", int(index), ": there are ",
              int(num_devices));
  return index;
}

// ---- memory: counted per device, with a limit so that running out of it can be tested

struct Counters {
  int64_t allocated = 0;
  int64_t peak = 0;
};
Counters counters[kMaxDevices];
int64_t total_memory = int64_t(8) << 30;
std::mutex memory_lock;

struct Block {
  void* data;
  size_t size;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(memory_lock);
    counters[block->device].allocated -= int64_t(block->size);
  }
  std::free(block->data);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const auto device = checked(current_device);
    if (size == 0) return {nullptr, nullptr, &release_nothing, c10::Device(kType, device)};
    {
      std::lock_guard<std::mutex> guard(memory_lock);
      auto& counter = counters[device];
      TORCH_CHECK_WITH(OutOfMemoryError, counter.allocated + int64_t(size) <= total_memory,
                       "device ", int(device), " out of memory: ", size, " bytes wanted, ",
                       total_memory - counter.allocated, " free");
      counter.allocated += int64_t(size);
      counter.peak = std::max(counter.peak, counter.allocated);
    }
    void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    return {data, new Block{data, size, device}, &release, c10::Device(kType, device)};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// ---- page-locked host memory: ordinary memory that is known to have been asked for as such

std::mutex pinned_lock;
std::unordered_map<const char*, size_t> pinned;

void release_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = std::aligned_alloc(64, (size + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(data)] = size;
    return {data, data, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};
PinnedAllocator pinned_allocator;

// ---- devices, streams, events

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_device); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kType, "not a device of this vendor: ", device);
    if (device.has_index()) current_device = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.has_index() ? checked(device.index()) : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.has_index() ? checked(device.index()) : current_device;
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, index));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const auto index = device.has_index() ? checked(device.index()) : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto old = getStream(stream.device());
    current_streams[checked(stream.device_index())] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(num_devices); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto span = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(num_devices); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = checked(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto old = current_device;
    current_device = checked(index);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    const auto* address = static_cast<const char*>(data);
    for (const auto& [start, size] : pinned)
      if (address >= start && address < start + std::max<size_t>(size, 1)) return true;
    return false;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    auto data = allocator.allocate(size);
    if (impl->nbytes() && size)
      std::memcpy(data.get(), impl->mutable_data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kType, current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();  // whose numbers the fallback draws
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
};
Hooks hooks;
const int registered = (at::RegisterPrivateUse1HooksInterface(&hooks), 0);

// ---- what the CPU fallback cannot do: making, viewing and copying

c10::Device device_or_current(std::optional<at::Device> device) {
  const auto index = device && device->has_index() ? device->index() : current_device;
  return c10::Device(kType, checked(index));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  on_host(target).copy_(on_host(source));
  return target;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  return at::_local_scalar_dense(on_host(tensor));
}

at::Tensor strided_view(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(offset.value_or(tensor.storage_offset()));
  impl->set_sizes_and_strides(sizes, strides);
  return view;
}

at::Tensor view(const at::Tensor& tensor, c10::IntArrayRef wanted) {
  const auto sizes = at::infer_size_dv(wanted, tensor.numel());
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with the tensor's size and stride");
  return strided_view(tensor, sizes, *strides, tensor.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return strided_view(tensor, sizes, strides, tensor.storage_offset());
}

const at::Tensor& resize(const at::Tensor& tensor, c10::SymIntArrayRef wanted,
                         std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(wanted);
  const size_t elements = size_t(c10::multiply_integers(sizes) + tensor.storage_offset());
  const size_t bytes = elements * tensor.element_size();
  if (tensor.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor& set_storage_at(at::Tensor& tensor, at::Storage storage, int64_t offset,
                           c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr || strides.size() != sizes.size())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto elements = int64_t(storage.nbytes() / tensor.element_size());
  return set_storage_at(tensor, std::move(storage), 0, {elements}, {});
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) return tensor;
  const auto elements = int64_t(tensor.storage().nbytes() / tensor.element_size());
  auto whole = at::from_blob(tensor.storage().mutable_data(), {elements}, [keep = tensor](void*) {},
                             at::TensorOptions().dtype(tensor.dtype()));
  auto same = whole.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) same = same.conj();
  if (tensor.is_neg()) same = same._neg_view();
  return same;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", strided_view);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_.source_Storage", set_storage);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

void bind_device(pybind11::module& m) {
  m.def("open", [](int count, int64_t memory_bytes) {
    TORCH_CHECK(count >= 0 && count <= kMaxDevices, "0 to ", kMaxDevices, " devices");
    num_devices = count;
    total_memory = memory_bytes;
  });
  m.def("device_count", [] { return int(num_devices); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { current_device = checked(c10::DeviceIndex(index)); });
  m.def("total_memory", [] { return total_memory; });
  m.def("memory_allocated", [](int index) {
    std::lock_guard<std::mutex> guard(memory_lock);
    return counters[checked(c10::DeviceIndex(index))].allocated;
  });
  m.def("max_memory_allocated", [](int index) {
    std::lock_guard<std::mutex> guard(memory_lock);
    return counters[checked(c10::DeviceIndex(index))].peak;
  });
  m.def("reset_peak_memory", [](int index) {
    std::lock_guard<std::mutex> guard(memory_lock);
    auto& counter = counters[checked(c10::DeviceIndex(index))];
    counter.peak = counter.allocated;
  });
}

}  // namespace double_device
