// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace double_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// The same memory as a tensor of the CPU. A tensor that is none of ours is returned as it is.
at::Tensor on_host(const at::Tensor& tensor);

void bind_device(pybind11::module& m);
void bind_collectives(pybind11::module& m);

}  // namespace double_device
