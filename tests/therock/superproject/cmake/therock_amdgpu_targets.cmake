# The targets of the table that rockenv has compiled in, in TheRock's own form.

set_property(GLOBAL PROPERTY THEROCK_AMDGPU_TARGETS)

function(therock_add_amdgpu_target gfx_target product_name)
  cmake_parse_arguments(PARSE_ARGV 2 ARG "" "" "FAMILY;EXCLUDE_TARGET_PROJECTS")
  set_property(GLOBAL APPEND PROPERTY THEROCK_AMDGPU_TARGETS "${gfx_target}")
  set_property(GLOBAL PROPERTY "THEROCK_AMDGPU_TARGET_NAME_${gfx_target}" "${product_name}")
  foreach(_project ${ARG_EXCLUDE_TARGET_PROJECTS})
    set_property(GLOBAL APPEND PROPERTY THEROCK_AMDGPU_PROJECT_TARGET_EXCLUDES_${_project} "${gfx_target}")
  endforeach()
  foreach(_family "${gfx_target}" ${ARG_FAMILY})
    set_property(GLOBAL APPEND PROPERTY THEROCK_AMDGPU_TARGET_FAMILIES "${_family}")
    set_property(GLOBAL APPEND PROPERTY "THEROCK_AMDGPU_TARGET_FAMILY_${_family}" "${gfx_target}")
  endforeach()
endfunction()

therock_add_amdgpu_target(gfx900 "Vega 10 / MI25" FAMILY dgpu-all gfx900-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx90c "AMD Renoir/Lucienne/Cezanne iGPU" FAMILY igpu-all gfx90c-igpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx906 "Radeon VII / MI50 CDNA" FAMILY dgpu-all gfx906-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx908 "MI100 CDNA" FAMILY dcgpu-all gfx908-dcgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
)

therock_add_amdgpu_target(gfx90a "MI210/250 CDNA" FAMILY dcgpu-all gfx90a-dcgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
)

therock_add_amdgpu_target(gfx942 "MI300A/MI300X CDNA" FAMILY dcgpu-all gfx94X-all gfx94X-dcgpu)

therock_add_amdgpu_target(gfx950 "MI350X/MI355X CDNA" FAMILY dcgpu-all gfx950-all gfx950-dcgpu)

therock_add_amdgpu_target(gfx1010 "AMD RX 5700" FAMILY dgpu-all gfx101X-all gfx101X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1011 "AMD Radeon Pro V520" FAMILY dgpu-all gfx101X-all gfx101X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1012 "AMD RX 5500" FAMILY dgpu-all gfx101X-all gfx101X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/1245
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1030 "AMD RX 6800 / XT" FAMILY dgpu-all gfx103X-all gfx103X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1031 "AMD RX 6700 / XT" FAMILY dgpu-all gfx103X-all gfx103X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1032 "AMD RX 6600" FAMILY dgpu-all gfx103X-all gfx103X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1033 "AMD Van Gogh iGPU" FAMILY igpu-all gfx103X-all gfx103X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
    composable_kernel
)

therock_add_amdgpu_target(gfx1034 "AMD RX 6500 XT" FAMILY dgpu-all gfx103X-all gfx103X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1035 "AMD Radeon 680M Laptop iGPU" FAMILY igpu-all gfx103X-all gfx103X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1036 "AMD Raphael iGPU" FAMILY igpu-all gfx103X-all gfx103X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipBLASLt # https://github.com/ROCm/TheRock/issues/1062
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    composable_kernel # https://github.com/ROCm/TheRock/issues/4836
    rocWMMA # https://github.com/ROCm/TheRock/issues/1944
    hipTensor # https://github.com/ROCm/TheRock/issues/2074
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1100 "AMD RX 7900 XTX" FAMILY dgpu-all gfx110X-all gfx110X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1101 "AMD RX 7800 XT" FAMILY dgpu-all gfx110X-all gfx110X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1102 "AMD RX 7700S/Framework Laptop 16" FAMILY dgpu-all gfx110X-all gfx110X-dgpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1103 "AMD Radeon 780M Laptop iGPU" FAMILY igpu-all gfx110X-all gfx110X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rccl # https://github.com/ROCm/TheRock/issues/150
    rccl-tests
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1150 "AMD Strix Point iGPU" FAMILY igpu-all gfx115X-all gfx115X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rccl # https://github.com/ROCm/TheRock/issues/150
    rccl-tests
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1151 "AMD Strix Halo iGPU" FAMILY igpu-all gfx115X-all gfx115X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1152 "AMD Krackan 1 iGPU" FAMILY igpu-all gfx115X-all gfx115X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rccl # https://github.com/ROCm/TheRock/issues/150
    rccl-tests
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1153 "AMD Radeon 820M iGPU" FAMILY igpu-all gfx115X-all gfx115X-igpu
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rccl # https://github.com/ROCm/TheRock/issues/150
    rccl-tests
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1200 "AMD RX 9060 / XT" FAMILY dgpu-all gfx120X-all
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1201 "AMD RX 9070 / XT" FAMILY dgpu-all gfx120X-all
  EXCLUDE_TARGET_PROJECTS
    hipSPARSELt # https://github.com/ROCm/TheRock/issues/2042
    rocprofiler-compute # https://github.com/ROCm/TheRock/issues/2892
)

therock_add_amdgpu_target(gfx1250 "AMD Instinct MI450/MI450X/MI455X CDNA" FAMILY dcgpu-all gfx125X-all gfx125X-dcgpu)


# Families and targets of one of the three lists, each target once.
function(therock_expand_targets out families targets)
  get_property(_known GLOBAL PROPERTY THEROCK_AMDGPU_TARGETS)
  get_property(_families GLOBAL PROPERTY THEROCK_AMDGPU_TARGET_FAMILIES)
  set(_all)
  foreach(_family ${families})
    if(NOT _family IN_LIST _families)
      message(FATAL_ERROR "THEROCK_AMDGPU_FAMILIES value '${_family}' unknown.")
    endif()
    get_property(_members GLOBAL PROPERTY "THEROCK_AMDGPU_TARGET_FAMILY_${_family}")
    list(APPEND _all ${_members})
  endforeach()
  foreach(_target ${targets})
    if(NOT _target IN_LIST _known)
      message(FATAL_ERROR "Unknown AMDGPU target '${_target}'.")
    endif()
    list(APPEND _all ${_target})
  endforeach()
  list(REMOVE_DUPLICATES _all)
  set(${out} ${_all} PARENT_SCOPE)
endfunction()

# As upstream: dist targets default to the families alone, and test targets to all there are.
function(therock_validate_amdgpu_targets)
  set(_selected ${THEROCK_AMDGPU_FAMILIES} ${THEROCK_AMDGPU_TARGETS})
  list(LENGTH _selected _count)
  if(_count GREATER 1 AND NOT THEROCK_AMDGPU_DIST_BUNDLE_NAME)
    message(FATAL_ERROR "More than one AMDGPU target bundle selected: THEROCK_AMDGPU_DIST_BUNDLE_NAME must be set explicitly.")
  endif()
  therock_expand_targets(_arch "${THEROCK_AMDGPU_FAMILIES}" "${THEROCK_AMDGPU_TARGETS}")
  if(NOT THEROCK_DIST_AMDGPU_FAMILIES AND NOT THEROCK_DIST_AMDGPU_TARGETS)
    set(THEROCK_DIST_AMDGPU_FAMILIES ${THEROCK_AMDGPU_FAMILIES})
  endif()
  therock_expand_targets(_dist "${THEROCK_DIST_AMDGPU_FAMILIES}" "${THEROCK_DIST_AMDGPU_TARGETS}")
  therock_expand_targets(_test "${THEROCK_TEST_AMDGPU_FAMILIES}" "${THEROCK_TEST_AMDGPU_TARGETS}")
  if(NOT _test)
    get_property(_test GLOBAL PROPERTY THEROCK_AMDGPU_TARGETS)
  endif()
  if(NOT _arch AND NOT _dist)
    message(FATAL_ERROR "No AMDGPU target selected: make a selection via THEROCK_AMDGPU_FAMILIES or THEROCK_AMDGPU_TARGETS")
  endif()
  message(STATUS "Targets: ${_arch}; dist: ${_dist}; test: ${_test}")
  set(THEROCK_AMDGPU_TARGETS ${_arch} PARENT_SCOPE)
  set(THEROCK_DIST_AMDGPU_TARGETS ${_dist} PARENT_SCOPE)
  set(THEROCK_TEST_AMDGPU_TARGETS ${_test} PARENT_SCOPE)
endfunction()
