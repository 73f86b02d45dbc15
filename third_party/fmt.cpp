// SPDX-License-Identifier: Apache-2.0
// fmt's non-template half, compiled once from the distribution's headers: Debian ships fmt as a
// shared library only, and header-only use costs six seconds a file.
#include <fmt/format-inl.h>

namespace fmt::detail {
template auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl<char>(locale_ref) -> char;
}  // namespace fmt::detail
