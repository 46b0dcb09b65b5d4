"""rocm-sdk path|targets|test|version"""

import sys
import unittest

from . import LIBRARIES, SITE, _dist_info, preload_libraries


class Test(unittest.TestCase):
    def testPreloadLibraries(self):
        for name in LIBRARIES:
            with self.subTest(msg="Check rocm_sdk.preload_libraries", shortname=name):
                preload_libraries(name)


def main():
    match sys.argv[1]:
        case "version":
            print(_dist_info.__version__)
        case "targets":
            print(" ".join(_dist_info.TARGETS))
        case "path":
            print(SITE / "_rocm_sdk_devel")
        case "test":
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(Test)
            sys.exit(not unittest.TextTestRunner(stream=sys.stdout, verbosity=3).run(suite).wasSuccessful())


if __name__ == "__main__":
    main()
