# Sub-projects and artifacts. Each sub-project is configured, built and installed by a ninja of its own, and everything that is
# handed on from one to the next is handed on by hard links.

set(THEROCK_BINARY_DIR "${CMAKE_BINARY_DIR}")
set(THEROCK_SOURCE_DIR "${CMAKE_SOURCE_DIR}")

function(therock_add_feature name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "GROUP" "REQUIRES")
  set(_default ON)
  if(ARG_GROUP AND NOT THEROCK_ENABLE_${ARG_GROUP})
    set(_default OFF)
  endif()
  set(THEROCK_ENABLE_${name} ${_default} CACHE BOOL "")
  set(THEROCK_ENABLE_${name} "$CACHE{THEROCK_ENABLE_${name}}" PARENT_SCOPE)
  set(THEROCK_REQUIRES_${name} ${ARG_REQUIRES} PARENT_SCOPE)
  set(THEROCK_ALL_FEATURES ${THEROCK_ALL_FEATURES} ${name} PARENT_SCOPE)
endfunction()

function(therock_finalize_features)
  set(_features ${THEROCK_ALL_FEATURES})
  list(REVERSE _features)
  foreach(_feature ${_features})
    if(THEROCK_ENABLE_${_feature})
      foreach(_required ${THEROCK_REQUIRES_${_feature}})
        if(NOT THEROCK_ENABLE_${_required})
          message(STATUS "Implicitly enabled: ${_required}")
          set(THEROCK_ENABLE_${_required} ON)
          set(THEROCK_ENABLE_${_required} ON PARENT_SCOPE)
        endif()
      endforeach()
    endif()
  endforeach()
endfunction()

foreach(_target therock-artifacts therock-dist)
  add_custom_target(${_target} ALL)
endforeach()
add_custom_target(artifacts DEPENDS therock-artifacts)
add_custom_target(dist DEPENDS therock-dist)
add_custom_target(therock-expunge)
add_custom_target(expunge DEPENDS therock-expunge)

# Downloads when it is built, into the build directory.
function(therock_subproject_fetch name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "SOURCE_DIR;URL;URL_HASH" "")
  include(ExternalProject)
  ExternalProject_Add(${name}
    PREFIX "${CMAKE_CURRENT_BINARY_DIR}/${name}_fetch"
    URL "${ARG_URL}" URL_HASH "${ARG_URL_HASH}" SOURCE_DIR "${ARG_SOURCE_DIR}" DOWNLOAD_EXTRACT_TIMESTAMP ON
    EXCLUDE_FROM_ALL ON CONFIGURE_COMMAND "" BUILD_COMMAND "" INSTALL_COMMAND "")
endfunction()

# therock_subproject(NAME SOURCE DIR [FOR NEUTRAL|TEST|ARCH] [HIP] [CONSOLE] [DEPS P...] [FETCHED TARGET] [FPRINT_SOURCE_HASH])
#
# Instead of SOURCE, EXTERNAL_SOURCE_DIR is relative to where it is declared. FOR says which list of targets its GPU_TARGETS is;
# none without.
function(therock_subproject name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "HIP;CONSOLE;FPRINT_SOURCE_HASH" "SOURCE;EXTERNAL_SOURCE_DIR;FOR;FETCHED" "DEPS")
  set(_dir "${CMAKE_CURRENT_BINARY_DIR}/${name}")
  if(ARG_EXTERNAL_SOURCE_DIR)
    cmake_path(ABSOLUTE_PATH ARG_EXTERNAL_SOURCE_DIR BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}" OUTPUT_VARIABLE ARG_SOURCE)
  else()
    cmake_path(ABSOLUTE_PATH ARG_SOURCE BASE_DIRECTORY "${THEROCK_SOURCE_DIR}" NORMALIZE)
  endif()

  set(_gpus)
  if(ARG_FOR STREQUAL "NEUTRAL")
    set(_gpus ${THEROCK_DIST_AMDGPU_TARGETS})
    if(NOT _gpus)
      message(FATAL_ERROR "Subproject ${name} requires dist AMDGPU targets but none were set. Set THEROCK_DIST_AMDGPU_FAMILIES.")
    endif()
  elseif(ARG_FOR STREQUAL "TEST")
    set(_gpus ${THEROCK_TEST_AMDGPU_TARGETS})
  elseif(ARG_FOR STREQUAL "ARCH")
    set(_gpus ${THEROCK_AMDGPU_TARGETS})
    if(NOT _gpus)
      message(FATAL_ERROR "Subproject ${name} requires AMDGPU targets but none were set. Set THEROCK_AMDGPU_FAMILIES.")
    endif()
  endif()
  get_property(_excluded GLOBAL PROPERTY THEROCK_AMDGPU_PROJECT_TARGET_EXCLUDES_${name})
  if(_gpus AND _excluded)
    list(REMOVE_ITEM _gpus ${_excluded})
    if(NOT _gpus)
      message(FATAL_ERROR "${name} has no target left: upstream would fall back to gfx906")
    endif()
  endif()

  # Everything below, in the order to look in.
  set(_deps)
  foreach(_dep ${ARG_DEPS})
    if(NOT TARGET ${_dep})
      message(FATAL_ERROR "${name} needs ${_dep}, which is not enabled")
    endif()
    get_target_property(_below ${_dep} THEROCK_DEPS)
    list(APPEND _deps ${_dep} ${_below})
  endforeach()
  list(REMOVE_DUPLICATES _deps)
  set(_prefixes)
  set(_stages)
  set(_prints)
  set(_below_are_known ON)
  set(_stamps)
  foreach(_dep ${_deps})
    get_target_property(_dep_dir ${_dep} THEROCK_DIR)
    get_target_property(_dep_print ${_dep} THEROCK_FPRINT)
    list(APPEND _prefixes "${_dep_dir}/dist")
    list(APPEND _stages "${_dep_dir}/stage")
    list(APPEND _stamps "${_dep_dir}/stamp/stage.stamp")
    list(APPEND _prints "${_dep_print}")
    if(NOT _dep_print)
      set(_below_are_known OFF)
    endif()
  endforeach()

  # Only written where it changed: its time decides whether the sub-project is configured again.
  set(_compiler)
  if(ARG_HIP)
    get_target_property(_llvm amd-llvm THEROCK_DIR)
    set(_compiler "set(CMAKE_CXX_COMPILER \"${_llvm}/dist/lib/llvm/bin/amdclang++\")\n")
  endif()
  file(CONFIGURE OUTPUT "${_dir}/_toolchain.cmake" CONTENT "${_compiler}set(GPU_TARGETS \"${_gpus}\" CACHE STRING \"\" FORCE)
set(CMAKE_C_COMPILER_LAUNCHER \"${CMAKE_C_COMPILER_LAUNCHER}\")
set(CMAKE_CXX_COMPILER_LAUNCHER \"${CMAKE_CXX_COMPILER_LAUNCHER}\")
set(CMAKE_C_COMPILER_WORKS ON)
set(CMAKE_CXX_COMPILER_WORKS ON)
" @ONLY)
  file(CONFIGURE OUTPUT "${_dir}/_init.cmake" CONTENT "set(CMAKE_PREFIX_PATH \"${_prefixes}\")\n" @ONLY)

  set(_type "${${name}_BUILD_TYPE}")
  if(NOT _type)
    set(_type "${CMAKE_BUILD_TYPE}")
  endif()

  # Upstream: the content of a small directory, of what is downloaded the words that say what; else the commit of the repository
  # that the source is in, or the word of a file beside it, which is in it where it is given as `.`; and nothing where something is
  # changed and not committed.
  set(_source)
  if(ARG_FPRINT_SOURCE_HASH OR ARG_FETCHED)
    set(_hashed "${ARG_SOURCE}")
    if(ARG_FETCHED)
      set(_hashed "${CMAKE_CURRENT_SOURCE_DIR}")
    endif()
    file(GLOB_RECURSE _files "${_hashed}/*")
    foreach(_file ${_files})
      file(SHA256 "${_file}" _hash)
      string(APPEND _source "${_hash}")
    endforeach()
  else()
    cmake_path(GET ARG_SOURCE PARENT_PATH _parent)
    cmake_path(GET ARG_SOURCE FILENAME _basename)
    if(EXISTS "${_parent}/.${_basename}.smrev")
      file(READ "${_parent}/.${_basename}.smrev" _source)
    else()
      execute_process(COMMAND git -C "${ARG_SOURCE}" rev-parse HEAD OUTPUT_VARIABLE _source ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    endif()
    execute_process(COMMAND git -C "${ARG_SOURCE}" diff --quiet --ignore-submodules HEAD RESULT_VARIABLE _dirty ERROR_QUIET OUTPUT_QUIET)
    if(NOT _dirty EQUAL 0)
      set(_source)
    endif()
  endif()
  file(SHA256 "${_dir}/_toolchain.cmake" _toolchain_hash)
  file(SHA256 "${_dir}/_init.cmake" _init_hash)
  set(_print)
  if(_source AND _below_are_known)
    string(SHA256 _print "${name}|${_source}|${_toolchain_hash}|${_init_hash}|${_type}|${_prints}")
  endif()

  set(_pool USES_TERMINAL)
  if(NOT ARG_CONSOLE AND NOT "$ENV{THEROCK_INTERACTIVE}")
    set(_pool JOB_POOL therock_background)
  endif()
  set(_tea "${Python3_EXECUTABLE}" "${THEROCK_SOURCE_DIR}/build_tools/teatime.py" --label "${name}")
  set(_logs "${THEROCK_BINARY_DIR}/logs/${name}")
  set(_files "${Python3_EXECUTABLE}" "${THEROCK_SOURCE_DIR}/build_tools/fileset_tool.py")
  if(EXISTS "${_dir}/stage.prebuilt")
    add_custom_command(OUTPUT "${_dir}/stamp/stage.stamp"
      COMMAND ${_files} copy "${_dir}/dist" "${_dir}/stage" ${_stages}
      COMMAND "${CMAKE_COMMAND}" -E touch "${_dir}/stamp/configure.stamp" "${_dir}/stamp/build.stamp" "${_dir}/stamp/stage.stamp"
      BYPRODUCTS "${_dir}/stamp/configure.stamp" "${_dir}/stamp/build.stamp"
      DEPENDS "${_dir}/stage.prebuilt" ${_stamps})
  else()
    add_custom_command(OUTPUT "${_dir}/stamp/configure.stamp"
      COMMAND ${_tea} "${_logs}_configure.log" -- "${CMAKE_COMMAND}" -G${CMAKE_GENERATOR} "-B${_dir}/build" "-S${ARG_SOURCE}"
        "-DCMAKE_BUILD_TYPE=${_type}" "-DCMAKE_INSTALL_PREFIX=${_dir}/stage"
        "-DCMAKE_TOOLCHAIN_FILE=${_dir}/_toolchain.cmake" "-DCMAKE_PROJECT_TOP_LEVEL_INCLUDES=${_dir}/_init.cmake"
        "-DROCM_VERSION=${ROCM_VERSION}" ${${name}_CMAKE_ARGS}
      COMMAND "${CMAKE_COMMAND}" -E touch "${_dir}/stamp/configure.stamp"
      DEPENDS "${_dir}/_toolchain.cmake" "${_dir}/_init.cmake" ${ARG_FETCHED} ${_stamps}
      COMMENT "Configure sub-project ${name}" VERBATIM)
    # No `-j`: each inner ninja takes as many jobs as it likes.
    add_custom_command(OUTPUT "${_dir}/stamp/build.stamp"
      COMMAND ${_tea} "${_logs}_build.log" -- "${CMAKE_COMMAND}" --build "${_dir}/build"
      COMMAND "${CMAKE_COMMAND}" -E touch "${_dir}/stamp/build.stamp"
      DEPENDS "${_dir}/stamp/configure.stamp" ${_pool}
      COMMENT "Building sub-project ${name}" VERBATIM)
    add_custom_command(OUTPUT "${_dir}/stamp/stage.stamp"
      COMMAND "${CMAKE_COMMAND}" -E rm -rf "${_dir}/stage" "${_dir}/dist"
      COMMAND ${_tea} "${_logs}_install.log" -- "${CMAKE_COMMAND}" --install "${_dir}/build"
      COMMAND ${_files} copy "${_dir}/dist" "${_dir}/stage" ${_stages}
      COMMAND "${CMAKE_COMMAND}" -E touch "${_dir}/stamp/stage.stamp"
      DEPENDS "${_dir}/stamp/build.stamp"
      COMMENT "Stage sub-project ${name}" VERBATIM)
  endif()
  add_custom_target(${name} DEPENDS "${_dir}/stamp/stage.stamp")
  set_target_properties(${name} PROPERTIES THEROCK_DIR "${_dir}" THEROCK_DEPS "${_deps}" THEROCK_FPRINT "${_print}")
  add_custom_target(${name}+configure DEPENDS "${_dir}/stamp/configure.stamp")
  add_custom_target(${name}+build DEPENDS "${_dir}/stamp/build.stamp")
  add_custom_target(${name}+stage DEPENDS "${_dir}/stamp/stage.stamp")
  add_custom_target(${name}+dist DEPENDS "${_dir}/stamp/stage.stamp")
  add_custom_target(${name}+expunge
    COMMAND "${CMAKE_COMMAND}" -E rm -rf "${_dir}/build" "${_dir}/stage" "${_dir}/dist" "${_dir}/stamp" "${_dir}/stage.prebuilt")
  add_dependencies(therock-expunge ${name}+expunge)
  add_dependencies(therock-dist ${name}+dist)
endfunction()

# therock_provide_artifact(NAME [ARCH] SUBPROJECTS P...): `artifacts/NAME_COMPONENT_generic`, and for ARCH also `..._TARGET`, which
# then has no fingerprint, as upstream.
function(therock_provide_artifact name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "ARCH" "" "SUBPROJECTS")
  set(_arguments)
  set(_stamps)
  set(_content "${name}")
  set(_computable ON)
  foreach(_project ${ARG_SUBPROJECTS})
    get_target_property(_dir ${_project} THEROCK_DIR)
    get_target_property(_print ${_project} THEROCK_FPRINT)
    if(NOT _print)
      set(_computable OFF)
      message(STATUS "Cannot compute fprint for artifact ${name} (no fprint for ${_project})")
    endif()
    string(APPEND _content "|${_print}")
    cmake_path(RELATIVE_PATH _dir BASE_DIRECTORY "${THEROCK_BINARY_DIR}" OUTPUT_VARIABLE _relative)
    list(APPEND _arguments "${_relative}/stage")
    list(APPEND _stamps "${_dir}/stamp/stage.stamp")
  endforeach()
  string(SHA256 _fprint "${_content}")
  set(_slices generic)
  if(ARG_ARCH)
    list(APPEND _slices ${THEROCK_AMDGPU_TARGETS})
  endif()
  foreach(_component lib run dev)
    set(_file "${THEROCK_BINARY_DIR}/artifacts/${name}_${_component}_generic.fprint")
    if(_computable AND NOT ARG_ARCH)
      file(WRITE "${_file}" "${_fprint}")
    else()
      file(REMOVE "${_file}")
    endif()
  endforeach()
  set(_stamp "${THEROCK_BINARY_DIR}/artifacts/.${name}.stamp")
  add_custom_command(OUTPUT "${_stamp}"
    COMMAND "${Python3_EXECUTABLE}" "${THEROCK_SOURCE_DIR}/build_tools/fileset_tool.py" artifact
      --root-dir "${THEROCK_BINARY_DIR}" --name ${name} --slices "${_slices}" ${_arguments}
    COMMAND "${CMAKE_COMMAND}" -E touch "${_stamp}"
    DEPENDS ${_stamps} COMMENT "Populate artifact ${name}" VERBATIM)
  add_custom_target(artifact-${name} DEPENDS "${_stamp}")
  add_dependencies(therock-artifacts artifact-${name})
  foreach(_project ${ARG_SUBPROJECTS})
    add_dependencies(${_project}+dist artifact-${name})
  endforeach()
  list(JOIN ARG_SUBPROJECTS "\", \"" _subprojects)
  set_property(GLOBAL APPEND PROPERTY THEROCK_ARTIFACTS "  \"${name}\": [\"${_subprojects}\"]")
endfunction()

# The groups and stages of the topology, of what is enabled.
function(therock_finish)
  foreach(_artifact ${THEROCK_TOPOLOGY_ARTIFACTS})
    if(TARGET artifact-${_artifact})
      add_dependencies(artifact-group-${THEROCK_TOPOLOGY_GROUP_${_artifact}} artifact-${_artifact})
    endif()
  endforeach()
  get_property(_all GLOBAL PROPERTY THEROCK_ARTIFACTS)
  list(JOIN _all ",\n" _all)
  file(WRITE "${THEROCK_BINARY_DIR}/artifact_subprojects.json" "{\n${_all}\n}\n")
  file(WRITE "${THEROCK_BINARY_DIR}/therock_dist_targets.txt" "${THEROCK_DIST_AMDGPU_TARGETS}\n")
endfunction()
