"""Operations over HTTP."""
