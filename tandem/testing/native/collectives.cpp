// SPDX-License-Identifier: Apache-2.0
// Collectives of such devices: each tensor is copied to host memory, another backend for the CPU does
// the work, and the result is copied back when it is waited for.

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace double_device {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

at::Tensor staged(const at::Tensor& tensor) {
  return on_host(tensor).clone(at::MemoryFormat::Contiguous);
}

Tensors staged(const Tensors& tensors) {
  Tensors copies;
  for (const auto& tensor : tensors) copies.push_back(staged(tensor));
  return copies;
}

// Work of the CPU's backend, and what is to be copied back once that is done.
struct StagedWork final : c10d::Work {
  StagedWork(int rank, std::vector<WorkPtr> works, Tensors sources, Tensors targets)
      : Work(rank), works_(std::move(works)), sources_(std::move(sources)), targets_(std::move(targets)) {}

  bool isCompleted() override {
    for (const auto& work : works_)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override {
    for (const auto& work : works_)
      if (!work->isSuccess()) return false;
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    const std::lock_guard<std::mutex> guard(lock_);
    for (size_t i = 0; i < targets_.size(); ++i) on_host(targets_[i]).copy_(sources_[i]);
    sources_.clear();
    targets_.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::mutex lock_;
  std::vector<WorkPtr> works_;
  Tensors sources_, targets_;
};

struct HostStaged final : c10d::Backend {
  HostStaged(BackendPtr inner, std::string name, bool averages)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        name_(std::move(name)),
        averages_(averages) {}

  const std::string getBackendName() const override { return name_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto copies = staged(tensors);
    auto work = inner_->broadcast(copies, options);
    return done(work, copies, tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto copies = staged(tensors);
    auto sum = options;
    const bool divides = as_sum(sum.reduceOp);
    auto work = inner_->allreduce(copies, sum);
    if (divides) divide(work, copies);
    return done(work, copies, tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    std::vector<WorkPtr> works;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      works.push_back(allreduce(one, each));
    }
    return all(std::move(works));
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto copies = staged(tensors);
    auto sum = options;
    const bool divides = as_sum(sum.reduceOp);
    auto work = inner_->reduce(copies, sum);
    if (divides) divide(work, copies);
    return getRank() == options.rootRank ? done(work, copies, tensors) : done(work, {}, {});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> copies{staged(outputs[0])};
    auto sent = staged(inputs);
    auto work = inner_->allgather(copies, sent, options);
    return done(work, copies[0], outputs[0]);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    auto received = staged(output), sent = staged(input);
    auto work = inner_->_allgather_base(received, sent, options);
    return done(work, {received}, {output});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i)
      works.push_back(_allgather_base(outputs[i], inputs[i], options));
    return all(std::move(works));
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    std::vector<Tensors> copies;
    for (const auto& list : outputs) copies.push_back(staged(list));
    auto sent = staged(inputs);
    auto work = inner_->gather(copies, sent, options);
    return copies.empty() ? done(work, {}, {}) : done(work, copies[0], outputs[0]);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    std::vector<Tensors> sent;
    for (const auto& list : inputs) sent.push_back(staged(list));
    auto copies = staged(outputs);
    auto work = inner_->scatter(copies, sent, options);
    return done(work, copies, outputs);
  }

  // By an all-reduce, which every backend of the CPU has.
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions sum;
    sum.reduceOp = options.reduceOp;
    const bool divides = as_sum(sum.reduceOp);
    Tensors copies{staged(input)};
    auto work = inner_->allreduce(copies, sum);
    if (divides) divide(work, copies);
    const auto count = output.numel();
    const auto part = copies[0].flatten().narrow(0, getRank() * count, count).view(output.sizes());
    return done(work, {part}, {output});
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (const auto& tensor : inputs[0]) flat.push_back(on_host(tensor).flatten());
    auto joined = at::cat(flat);
    return _reduce_scatter_base(outputs[0], joined, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i)
      works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
    return all(std::move(works));
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto received = staged(output), sent = staged(input);
    auto work = inner_->alltoall_base(received, sent, output_sizes, input_sizes, options);
    return done(work, {received}, {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    // gloo knows only the form with one tensor each.
    Tensors flat;
    std::vector<int64_t> received_sizes, sent_sizes;
    int64_t total = 0;
    for (const auto& tensor : inputs) {
      flat.push_back(on_host(tensor).flatten());
      sent_sizes.push_back(tensor.numel());
    }
    for (const auto& tensor : outputs) {
      received_sizes.push_back(tensor.numel());
      total += tensor.numel();
    }
    auto sent = at::cat(flat);
    auto received = at::empty({total}, sent.options());
    auto work = inner_->alltoall_base(received, sent, received_sizes, sent_sizes, options);
    Tensors parts;
    const auto cut = received.split_with_sizes(received_sizes);
    for (size_t i = 0; i < outputs.size(); ++i) parts.push_back(cut[i].view(outputs[i].sizes()));
    return done(work, parts, outputs);
  }

  WorkPtr send(Tensors& tensors, int target, int tag) override {
    auto copies = staged(tensors);
    auto work = inner_->send(copies, target, tag);
    return c10::make_intrusive<StagedWork>(getRank(), std::vector<WorkPtr>{work}, copies, copies);
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    auto copies = staged(tensors);
    auto work = inner_->recv(copies, source, tag);
    return done(work, copies, tensors);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override {}
  void shutdown() override {}

 private:
  WorkPtr done(WorkPtr work, Tensors sources, const Tensors& targets) {
    return c10::make_intrusive<StagedWork>(getRank(), std::vector<WorkPtr>{std::move(work)},
                                           std::move(sources), targets);
  }
  WorkPtr all(std::vector<WorkPtr> works) {
    return c10::make_intrusive<StagedWork>(getRank(), std::move(works), Tensors{}, Tensors{});
  }
  // Whether what was an average is a sum now, which is to be divided.
  bool as_sum(c10d::ReduceOp& op) const {
    if (op != c10d::ReduceOp::AVG) return false;
    TORCH_CHECK(averages_, name_, " does not support ReduceOp.AVG");
    op = c10d::ReduceOp(c10d::ReduceOp::SUM);
    return true;
  }
  void divide(const WorkPtr& work, Tensors& sums) {
    work->wait();
    for (auto& sum : sums) sum.div_(getSize());
  }

  BackendPtr inner_;
  std::string name_;
  bool averages_;
};

}  // namespace

void bind_collectives(pybind11::module& m) {
  m.def("host_staged", [](BackendPtr inner, const std::string& name, bool averages) {
    return BackendPtr(c10::make_intrusive<HostStaged>(std::move(inner), name, averages));
  });
}

}  // namespace double_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  double_device::bind_device(m);
  double_device::bind_collectives(m);
}
