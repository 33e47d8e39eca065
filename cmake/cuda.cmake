# Finds nvcc and turns CUDA on. Reached only when TOKENYARD_CUDA is on, so a machine without nvcc is told, not skipped.
include(CheckLanguage)

if(NOT CMAKE_CUDA_COMPILER)
  find_program(TOKENYARD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(TOKENYARD_NVCC)
    set(CMAKE_CUDA_COMPILER ${TOKENYARD_NVCC})
  endif()
endif()
if(NOT CMAKE_CUDA_HOST_COMPILER)
  # One compiler on both sides: layouts of shared structs are checked by one set of rules.
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a)
endif()

check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "TOKENYARD_CUDA is on and there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda: "
                      "install the CUDA toolkit, or configure with TOKENYARD_CUDA=OFF")
endif()
enable_language(CUDA)
# Its static runtime finds the driver when a program first uses it, and programs start without one.
find_package(CUDAToolkit 12.5 REQUIRED)
# CMake 3.25 does not know how nvcc 13 spells the standard.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)

# nvcc fuses multiply-adds unless told; see tokenyard_flags. Layouts index std::array in functions of both machines, which
# are constexpr and become device code with the relaxed rule.
target_compile_options(tokenyard_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--expt-relaxed-constexpr;-Xcompiler=-ffp-contract=off;-Xcompiler=-Wall;-Xcompiler=-Wextra>)
