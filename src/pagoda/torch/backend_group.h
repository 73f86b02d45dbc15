// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "pagoda/comm/group.h"

namespace c10d {
class Backend;
}

namespace pagoda::torch {

/// A group over a backend of c10d that somebody else has made and that is ours from now on: NCCL,
/// which moves the memory of `device`. What is sent is copied there first and what is received
/// afterwards, on a stream of its own.
///
/// For collectives: NCCL matches messages by their order alone, and has no receive from anyone.
std::unique_ptr<comm::Group> make_backend_group(c10::intrusive_ptr<::c10d::Backend> backend,
                                                std::string name, c10::Device device);

}  // namespace pagoda::torch
