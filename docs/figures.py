class Figures:
    mutations=[]
    problems=[]
    def __init__(self): pass
    def fill(self,text,proofs): return text
    def write(self,out): pass
