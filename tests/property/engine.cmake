# SPDX-License-Identifier: Apache-2.0
pagoda_test(property_volume WHOLE LABELS property TIMEOUT 300
  SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/engine/rehearsal.cpp volume.cpp
  LIBRARIES pagoda_engine)
