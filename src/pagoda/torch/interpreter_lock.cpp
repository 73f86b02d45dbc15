// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/interpreter_lock.h"

#include <dlfcn.h>

namespace pagoda::torch {
namespace {

/// What CPython exports; all null where there is none.
struct Interpreter {
  template <class Function>
  static Function* find(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));  // NOLINT
  }

  int (*is_initialized)() = find<int()>("Py_IsInitialized");
  int (*holds_lock)() = find<int()>("PyGILState_Check");
  void* (*release)() = find<void*()>("PyEval_SaveThread");
  void (*take)(void*) = find<void(void*)>("PyEval_RestoreThread");

  bool locked_by_this_thread() const {
    return is_initialized != nullptr && holds_lock != nullptr && release != nullptr &&
           take != nullptr && is_initialized() != 0 && holds_lock() == 1;
  }
};

const Interpreter& interpreter() {
  static const Interpreter found;
  return found;
}

}  // namespace

WithoutInterpreterLock::WithoutInterpreterLock() {
  if (interpreter().locked_by_this_thread()) state_ = interpreter().release();
}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (state_ != nullptr) interpreter().take(state_);
}

}  // namespace pagoda::torch
