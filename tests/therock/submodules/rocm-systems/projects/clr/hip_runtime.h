#pragma once
extern "C" int hipInit(unsigned);
#define __global__
