# SPDX-License-Identifier: Apache-2.0
# Counts bytes of models large enough that padding does not show: under sanitizers it would take
# minutes, and unit_runtime goes the same ways there with small ones.
if(NOT PAGODA_SANITIZE)
  pagoda_test(property_volume WHOLE LABELS property TIMEOUT 300
    SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/engine/rehearsal.cpp volume.cpp
    LIBRARIES pagoda_engine)
endif()
