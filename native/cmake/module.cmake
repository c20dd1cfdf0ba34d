# The Python modules: `_native`, that is exec/, kernels/ and bindings/ on top of the torch of the Python that builds; and
# `_liveness`, which takes nothing but pybind11's headers from it, and runs without.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)

# torch's headers and libraries are taken by their paths: find_package(Torch) asks for a CUDA toolkit wherever torch was
# built with CUDA, and nothing here needs one. The folder is asked for at every configuration, because a build folder
# outlives the environment that it was first configured in. torch itself is not imported, because that loads the
# extensions of other vendors, which may want libraries that this machine does not have.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [[
import importlib.util, sys
torch = importlib.util.find_spec("torch") or sys.exit("the native module needs torch, which is not installed")
print(torch.submodule_search_locations[0])]]
  OUTPUT_VARIABLE torch OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
set(torch_includes "${torch}/include" "${torch}/include/torch/csrc/api/include")
set(torch_libraries "${torch}/lib/libc10.so" "${torch}/lib/libtorch_cpu.so" "${torch}/lib/libtorch_python.so")

file(GLOB module_sources CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/commit/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/exec/*/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/kernels/*.cc"
  "${CMAKE_CURRENT_SOURCE_DIR}/bindings/*.cc")

Python_add_library(_native MODULE WITH_SOABI ${module_sources})
target_compile_definitions(_native PRIVATE TORCH_EXTENSION_NAME=_native TORCH_API_INCLUDE_EXTENSION_H)
target_include_directories(_native SYSTEM PRIVATE ${torch_includes})
target_link_libraries(_native PRIVATE elaswave_flags ${torch_libraries})
if(TARGET elaswave_comm)
  target_link_libraries(_native PRIVATE elaswave_comm)
endif()
# torch is imported before the module, which finds its libraries already loaded: no path of this machine goes in.
set_target_properties(_native PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "")
install(TARGETS _native LIBRARY DESTINATION elaswave_fx COMPONENT module)

Python_add_library(_liveness MODULE WITH_SOABI liveness/module.cc)
target_include_directories(_liveness SYSTEM PRIVATE ${torch_includes})
target_link_libraries(_liveness PRIVATE elaswave_liveness)
install(TARGETS _liveness LIBRARY DESTINATION elaswave_fx COMPONENT module)
