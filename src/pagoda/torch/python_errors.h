// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"

namespace pagoda::torch {

/// An error as Python gets it, with its class in front: TorchBind knows RuntimeError only.
class PythonError : public std::runtime_error {
 public:
  PythonError(const char* family, const std::string& text)
      : std::runtime_error(fmt::format("pagoda.{}: {}", family, text)) {}
};

/// Runs what a method of a bound class does.
template <class Work>
auto translating_errors(const Work& work) {
  try {
    return work();
  } catch (const UserError& error) {
    log::debug("torch", "UserError", {{"cause", error.located()}});
    throw PythonError("UserError", error.what());
  } catch (const EngineError& error) {
    log::debug("torch", "EngineError", {{"cause", error.located()}});
    throw PythonError("EngineError", error.what());
  }
}

}  // namespace pagoda::torch
