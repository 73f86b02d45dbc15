// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/error.h"

namespace pagoda {

Error::Error(std::string message, std::vector<ErrorContext> contexts, std::source_location where)
    : message_(std::move(message)), contexts_(std::move(contexts)), where_(where) {
  compose();
}

void Error::add_context(ErrorContext item) {
  contexts_.push_back(std::move(item));
  compose();
}

std::string Error::located() const {
  return fmt::format("{} ({}:{})", text_, where_.file_name(), where_.line());
}

void Error::compose() {
  text_ = message_;
  if (!contexts_.empty()) {
    text_ += " [";
    for (const ErrorContext& item : contexts_) {
      if (&item != &contexts_.front()) text_ += ", ";
      text_ += item.key + "=" + item.value;
    }
    text_ += "]";
  }
}

}  // namespace pagoda
