# Prints ROCM_SDK_TARGET_FAMILY for the installation of TheRock's `rocm` package: family.sh 'TARGET;TARGET' WHERE
#
# Without it, that package asks the machine's GPU which target it is for. It accepts only names of its wheels: targets, or in an
# index for one family, as before 7.13, the family, which the index's address ends in.

set -eu
name=${2%/}
name=${name##*/}
case $name in
gfx*) echo "$name" ;;
*) echo "${1%%;*}" ;;
esac
