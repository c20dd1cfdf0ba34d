# The Python modules: `_native`, that is exec/, kernels/ and bindings/ on top of the torch of the Python that builds; and
# `_liveness`, which takes nothing but pybind11's headers from it, and runs without.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

# Asked for at every configuration: a build folder outlives the environment it was first configured in, and CMake would
# remember the old environment's torch.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import torch.utils; print(torch.utils.cmake_prefix_path)"
  OUTPUT_VARIABLE torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(Torch_DIR "${torch_prefix}/Torch" CACHE PATH "torch's CMake files" FORCE)
unset(TORCH_LIBRARY CACHE)
unset(c10_LIBRARY CACHE)
unset(TORCH_PYTHON_LIBRARY CACHE)
# torch's configuration adds -D_GLIBCXX_USE_CXX11_ABI to this and asks for a CUDA toolkit only in a CUDA build.
find_package(Torch REQUIRED)
find_library(TORCH_PYTHON_LIBRARY torch_python PATHS "${torch_prefix}/../../lib" NO_DEFAULT_PATH REQUIRED)

file(GLOB module_sources CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/commit/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/exec/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/bindings/*.cc")

Python_add_library(_native MODULE WITH_SOABI ${module_sources})
separate_arguments(torch_flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
target_compile_options(_native PRIVATE ${torch_flags})
target_compile_definitions(_native PRIVATE TORCH_EXTENSION_NAME=_native TORCH_API_INCLUDE_EXTENSION_H)
target_include_directories(_native SYSTEM PRIVATE ${TORCH_INCLUDE_DIRS})
target_link_libraries(_native PRIVATE elaswave_flags ${TORCH_LIBRARIES} "${TORCH_PYTHON_LIBRARY}")
if(TARGET elaswave_comm)
  target_link_libraries(_native PRIVATE elaswave_comm)
endif()
# torch is imported before the module, which finds its libraries already loaded: no path of this machine goes in.
set_target_properties(_native PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
install(TARGETS _native LIBRARY DESTINATION elaswave_fx COMPONENT module)

Python_add_library(_liveness MODULE WITH_SOABI liveness/module.cc)
target_include_directories(_liveness SYSTEM PRIVATE ${TORCH_INCLUDE_DIRS})
target_link_libraries(_liveness PRIVATE elaswave_liveness)
install(TARGETS _liveness LIBRARY DESTINATION elaswave_fx COMPONENT module)
