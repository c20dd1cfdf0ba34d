"""Connections between two processes are reset, others stay."""

from __future__ import annotations

import os
import socket

import pytest

from tools.bench.connection_resets import CannotCut, cut_links


def test_connections_between_two_processes_are_cut_and_others_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            with socket.create_connection(listener.getsockname()) as link:
                os.write(tell, b"!")
                try:
                    link.recv(1)
                except OSError:
                    os._exit(0)
            os._exit(1)
        mine, _ = listener.accept()
        os.read(told, 1)
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        try:
            assert cut_links(child, [os.getpid()]) == 1
        except CannotCut as error:
            if os.geteuid() == 0:
                raise
            pytest.skip(str(error))
        finally:
            mine.close()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the other end has noticed"
        here.sendall(b"x")
        assert there.recv(1) == b"x"
        for end in (here, there):
            end.close()
        os.close(told)
        os.close(tell)
